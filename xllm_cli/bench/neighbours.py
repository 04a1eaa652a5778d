"""`xllm bench neighbours`: several servers whose peaks do not coincide, on one budget of memory.

Three ways to share it, in the same processes and on the same trace, one after the other:

    shares   every server has its own part of the budget, for ever (a live limit)
    elastic  no parts: who peaks takes what the others only remember
    ample    every server has its own part, of a budget with which parts do as well as elastic

A peak is a set of conversations that fits the whole budget but no part of it: the first turn of each is computed (not
counted), further turns hit what is still cached. Compared is the time to the first token of further turns. Then, alone:
how fast a limit takes effect on an idle server, and how fast a starving one gets what an idle one remembers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from xllm_cli.bench.load import TOKEN_IDS, Address, LoadError, complete
from xllm_cli.bench.memory_group import MemoryGroup, memory_group
from xllm_cli.bench.servers import Server, memory, order
from xllm_cli.errors import XllmError
from xllm_cli.fetch import fetch

MIB = 1 << 20
OUTPUT_TOKENS = 8
BUDGET = 0.6  # of what all working sets together need: the budget of `shares` and `elastic`
SLACK = 8 * MIB  # by which the budget may be missed: processes breathe


class Peak(NamedTuple):
    """Conversations of `prompt_tokens` each, `at_once` at a time, `turns` counted ones of each."""

    conversations: int
    prompt_tokens: int
    turns: int
    at_once: int


class Outcome(NamedTuple):
    """One way to share: seconds to the first token of every further turn, and requests that failed."""

    first: list[float]
    failed: int

    def quantile(self, share: float) -> float:
        """The value that `share` of the turns stay below."""
        return sorted(self.first)[min(len(self.first) - 1, int(share * len(self.first)))]


@click.command("neighbours", context_settings={"ignore_unknown_options": True})
@click.option("--model", help="checkpoint folder; unset fetches a small one", type=click.Path(exists=True))
@click.option("--servers", "count", default=3, show_default=True, type=click.IntRange(2, 8))
@click.option("--conversations", default=6, show_default=True, type=click.IntRange(2))
@click.option("--prompt_tokens", default=500, show_default=True, type=click.IntRange(64))
@click.option("--turns", default=4, show_default=True, type=click.IntRange(1), help="counted turns of a conversation")
@click.argument("server_flags", nargs=-1, type=click.UNPROCESSED)
def command(
    *, model: str | None, count: int, conversations: int, prompt_tokens: int, turns: int, server_flags: tuple[str, ...]
) -> None:
    """Servers with staggered peaks on one budget against fixed shares of it. Needs root, for a memory cgroup."""
    peak = Peak(conversations, prompt_tokens, turns, at_once=2)
    flags = [f"--model={model or fetch('smollm2-135m-instruct')}", *server_flags]
    with memory_group() as group, contextlib.ExitStack() as stack:
        addresses = [server.address for server in _start(flags, count, group, stack)]
        trial = Trial(group, addresses, peak)
        for line in trial.compare():
            click.echo(line)
        for line in trial.react():
            click.echo(line)


def _start(flags: list[str], count: int, group: MemoryGroup, stack: contextlib.ExitStack) -> Iterator[Server]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    meeting = f"--vmm_neighbours_dir={folder}"
    for number in range(count):
        every = [*flags, "--enable_vmm_kvcache=true", "--vmm_elastic=true", meeting, f"--model_id=server-{number}"]
        yield stack.enter_context(Server(every, log=folder / f"{number}.log", within=group.command))


class Trial:
    """Servers in a group, and the working set of one peak in bytes."""

    def __init__(self, group: MemoryGroup, addresses: list[Address], peak: Peak) -> None:
        self._group = group
        self._addresses = addresses
        self._peak = peak
        self._run_peak(addresses[0], seed=0)  # what a peak needs, and what it needs besides KV
        self._need = memory(addresses[0])["kv_cached"] + 2 * memory(addresses[0])["page_bytes"]
        for address in addresses[1:]:
            self._run_peak(address, seed=0)

    def compare(self) -> Iterator[str]:
        """The table of the three ways."""
        whole = self._need * len(self._addresses)
        budget = int(BUDGET * whole)
        yield (
            f"{len(self._addresses)} servers, a peak needs {self._need / MIB:.0f} MiB of KV; "
            f"{self._peak.conversations} conversations of {self._peak.prompt_tokens} tokens, {self._peak.turns} turns"
        )
        yield f"{'':8} {'budget MiB':>10} {'p50 ms':>8} {'p99 ms':>8} {'p99 ratio':>9} {'turns':>6} {'failed':>6}"
        base = 0.0
        for name, total, is_shared in (("shares", budget, True), ("elastic", budget, False), ("ample", whole, True)):
            outcome = self._share(total, is_shared=is_shared)
            worst = outcome.quantile(0.99)
            base = base or worst
            yield (
                f"{name:8} {total / MIB:>10.0f} {outcome.quantile(0.5) * 1e3:>8.1f} {worst * 1e3:>8.1f} "
                f"{base / worst:>9.2f} {len(outcome.first):>6} {outcome.failed:>6}"
            )

    def _share(self, total: int, *, is_shared: bool) -> Outcome:
        self._empty()
        self._set_budget(total)
        for address in self._addresses:
            order(address, "/vmm/limit", {"bytes": total // len(self._addresses) if is_shared else 0})
        parts = [self._run_peak(address, seed=number) for number, address in enumerate(self._addresses)]
        self._empty()
        return Outcome([first for part in parts for first in part.first], sum(part.failed for part in parts))

    def _empty(self) -> None:
        for address in self._addresses:
            order(address, "/vmm/limit", {"bytes": 0})
            order(address, "/vmm/trim", {})

    def _set_budget(self, total: int) -> None:
        """Limit the group so that `total` bytes of KV may be mapped, whatever its processes need besides."""
        limit = self._group.used() + 2 * total
        for _ in range(6):
            self._group.limit(limit)
            time.sleep(1.1)  # an idle engine looks once a second
            room = min(memory(address)["headroom"] for address in self._addresses)
            if abs(room - total) <= SLACK:
                return
            limit += total - room
        raise XllmError(f"a budget of {total} bytes cannot be set: {room} may be mapped. Is the machine busy?")

    def _run_peak(self, address: Address, *, seed: int) -> Outcome:
        numbers = random.Random(seed)
        length, count = self._peak.prompt_tokens, self._peak.conversations
        prompts = [[numbers.randrange(TOKEN_IDS) for _ in range(length)] for _ in range(count)]
        return asyncio.run(_talk(address, prompts, self._peak))

    def react(self) -> Iterator[str]:
        """How fast a limit takes effect, and how fast a neighbour's idle memory arrives; medians of five."""
        rich, poor = self._addresses[:2]
        limits, answers = [], []
        for number in range(5):
            self._empty()
            self._run_peak(rich, seed=number)
            done = order(rich, "/vmm/limit", {"bytes": 2 * MIB})
            limits.append((done["milliseconds"], done["freed"]))
        yield (
            f"limit on an idle server: {statistics.median(took for took, _ in limits):.1f} ms for "
            f"{statistics.median(freed for _, freed in limits) / MIB:.0f} MiB, "
            f"{statistics.median(freed / took for took, freed in limits) / 1e6:.1f} GB/s"
        )
        for number in range(5):
            self._empty()
            self._run_peak(rich, seed=number)
            before = memory(poor)["neighbours"]["received"]
            self._set_budget(2 * SLACK)
            self._run_peak(poor, seed=number)
            now = memory(poor)["neighbours"]
            if now["received"] > before:
                answers.append((now["answer_microseconds"] / 1e3, now["received"] - before))
            self._group.limit(self._group.used() + 4 * self._need)
        if answers:
            yield (
                f"a neighbour's idle memory: {statistics.median(took for took, _ in answers):.1f} ms from the last "
                f"question to its answer, {statistics.median(got for _, got in answers) / MIB:.0f} MiB in all"
            )


async def _talk(address: Address, prompts: list[list[int]], peak: Peak) -> Outcome:
    """Every conversation's first turn, then `turns` rounds of the next ones, a few at a time."""
    seats = asyncio.Semaphore(peak.at_once)
    first: list[float] = []
    failures: list[LoadError] = []

    async def turn(prompt: list[int], *, is_counted: bool) -> None:
        async with seats:
            try:
                timing = await complete(address, prompt, OUTPUT_TOKENS)
            except LoadError as error:
                failures.append(error)
                return
        if is_counted:
            first.append(timing.first)

    for number in range(peak.turns + 1):
        await asyncio.gather(*(turn(prompt, is_counted=number > 0) for prompt in prompts))
    return Outcome(first, len(failures))
