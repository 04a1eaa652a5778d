"""`xllm bench sleep`: what it costs to put a model to sleep and to wake it, beside this machine's own memcpy.

Starts one server, and looks at its memory from outside: what its memfds hold (`st_blocks`) and what its processes hold
besides. Times are the engine's, from the command to its answer. Knows the goals by their numbers, no reason for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from xllm_cli.bench.memory_watch import held_bytes, memfd_bytes
from xllm_cli.bench.rows import HEADING, Row, line
from xllm_cli.bench.servers import Server, memory, order
from xllm_cli.errors import XllmError
from xllm_cli.fetch import fetch

MIB = 1 << 20
FLAGS = ("--enable_vmm_weights=true", "--enable_vmm_kvcache=true", "--vmm_elastic=true")
BEDS: dict[str, dict[str, Any]] = {
    "light": {"master_status": 1},
    "parked": {"park": True},
    "deep": {"master_status": 2},
}
MEMCPY_SHARE = 0.8  # of memcpy's rate, that waking from the copy should reach
FIRST_SHARE = 1.2  # of a later sleep's time, that the first may take
RESIDENT_SHARE, TRANSIENT_SHARE = 0.01, 0.05  # of the pool after a sleep, of the model beyond it while it wakes
GROWTH_BYTES = MIB
DEEP_PART = 5  # one deep cycle for so many others: each reads the checkpoint
PARKED_MS_PER_GIB = 3.0
WATCH_SECONDS = 0.002
SLOW_SECONDS = 120.0  # for an answer, or a wake-up that reads the checkpoint, on a busy machine
PROMPT = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


class Cycle(NamedTuple):
    """One sleep after an answer, whose KV goes with it, and one wake-up: milliseconds, and bytes resident between."""

    sleep: float
    wake: float
    resident: int


@click.command("sleep", context_settings={"ignore_unknown_options": True})
@click.option("--model", help="checkpoint folder; unset fetches a small one", type=click.Path(exists=True))
@click.option("--cycles", default=20, show_default=True, type=click.IntRange(2), help="of each level; deep a fifth")
@click.argument("server_flags", nargs=-1, type=click.UNPROCESSED)
def command(*, model: str | None, cycles: int, server_flags: tuple[str, ...]) -> None:
    """Sleep, wake-up and parking of one model, each beside the memcpy of as many bytes."""
    flags = [f"--model={model or fetch('smollm2-135m-instruct')}", *FLAGS, *server_flags]
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"--vmm_neighbours_dir={folder}"
        with Server([*flags, meeting], log=Path(folder) / "log") as server:
            click.echo(HEADING)
            for row in Trial(server).run(cycles):
                click.echo(line(row))


class Trial:
    """A server whose model sleeps and wakes."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._text = self._answer()
        self._weights = int(memory(server.address)["weights"])
        self._pool = int(memory(server.address)["physical"])

    def run(self, cycles: int) -> Iterator[Row]:
        """The rows, level by level; then what is left of it all."""
        first = self._cycle("light")
        before = held_bytes(self._server.pid)
        for name in BEDS:
            times = max(2, cycles // DEEP_PART) if name == "deep" else cycles
            done = [self._cycle(name) for _ in range(times)]
            yield from self._rows(name, copy_milliseconds(self._weights), done)
            if name == "light":
                steady = statistics.median(cycle.sleep for cycle in done)
                yield Row(name, "the server's first sleep over a later one", first.sleep / steady, "", bar=FIRST_SHARE)
        self._check_answer()
        order(self._server.address, "/vmm/trim", {})
        yield Row("all", "growth over all cycles", held_bytes(self._server.pid) - before, "B", bar=GROWTH_BYTES)

    def _rows(self, name: str, copy: float, cycles: list[Cycle]) -> Iterator[Row]:
        sleep = statistics.median(cycle.sleep for cycle in cycles)
        wake = statistics.median(cycle.wake for cycle in cycles)
        size = f"{self._weights / MIB:.0f} MiB"
        bar = {"light": copy / MEMCPY_SHARE, "parked": PARKED_MS_PER_GIB * self._weights / 2**30}.get(name)
        yield Row(name, f"sleep, {size}", sleep, "ms")
        yield Row(name, f"wake-up, {size}, median", wake, "ms", copy, "memcpy", bar)
        yield Row(name, f"wake-up, {size}, best", min(cycle.wake for cycle in cycles), "ms", copy, "memcpy", bar)
        yield Row(name, "wake-up", self._weights / wake / 1e6, "GB/s")
        resident, most = max(cycle.resident for cycle in cycles), RESIDENT_SHARE * self._pool
        beyond = max(self._peak(name) for _ in range(2))
        text = "resident while asleep, seen from outside"
        yield Row(name, text, resident, "B", bar=None if name == "parked" else most)
        text = "transient beyond the weights while it wakes"
        yield Row(name, text, beyond, "B", bar=TRANSIENT_SHARE * self._weights)

    def _cycle(self, name: str) -> Cycle:
        address = self._server.address
        self._check_answer()
        asleep = order(address, "/sleep", BEDS[name])
        resident = memfd_bytes(self._server.pid)
        return Cycle(asleep["milliseconds"], order(address, "/wakeup", {}, SLOW_SECONDS)["milliseconds"], resident)

    def _peak(self, name: str) -> int:
        """The most bytes held while it wakes, beyond what it holds awake. Looking slows it: it is not timed."""
        address, pid = self._server.address, self._server.pid
        awake = held_bytes(pid)
        order(address, "/sleep", BEDS[name])
        with watch(pid) as seen:
            order(address, "/wakeup", {}, SLOW_SECONDS)
        return max(0, max(seen, default=awake) - awake)

    def _check_answer(self) -> None:
        if self._answer() != self._text:
            raise XllmError("the model answers otherwise than before it slept")

    def _answer(self) -> str:
        text: str = order(self._server.address, "/v1/completions", PROMPT, SLOW_SECONDS)["choices"][0]["text"]
        return text


@contextlib.contextmanager
def watch(pid: int) -> Iterator[list[int]]:
    """Bytes that the server holds, looked at every few milliseconds until the block ends."""
    seen: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(WATCH_SECONDS):
            seen.append(held_bytes(pid))

    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    try:
        yield seen
    finally:
        done.set()
        watching.join()


def copy_milliseconds(nbytes: int) -> float:
    """The median of five copies between two touched buffers, by one thread."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    taken = []
    for _ in range(5):
        begin = time.perf_counter()
        ctypes.memmove(target.ctypes.data, source.ctypes.data, nbytes)
        taken.append(1000 * (time.perf_counter() - begin))
    return statistics.median(taken)
