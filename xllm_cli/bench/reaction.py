"""How fast engines see each other, and memory that a server at rest only remembers is free for others: on its
neighbour's word, and on an order.

The benchmark itself is the neighbour, so that exactly 64 MiB are asked for, and the time counts until the answer is
here: the server has woken, forgotten, and given the pages back. The model has much KV and little arithmetic.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from xllm_cli.bench.load import TOKEN_IDS, Address, complete
from xllm_cli.bench.rows import Row
from xllm_cli.bench.servers import Server, memory, order
from xllm_cli.bench.vmm_rig import p50
from xllm_cli.bench.wide_model import BYTES_PER_TOKEN, make_wide_model
from xllm_cli.errors import XllmError
from xllm_cli.neighbours.folder import device_folder
from xllm_cli.neighbours.peers import Neighbours
from xllm_cli.neighbours.status import Status, StatusFile, read_statuses

MIB = 1 << 20
ASKED = 64 * MIB
REMEMBERED = 2 * ASKED
ENGINES = 8
ANSWER_SECONDS = 10.0


def measure_reaction(*, repeats: int) -> Iterator[Row]:
    """Rows with medians of `repeats` tries. Raises ServerFailed, LoadError, and XllmError if no answer comes."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = [
            f"--model={make_wide_model(folder / 'model')}", "--block_size=16", "--enable_vmm_kvcache=true",
            "--vmm_elastic=true", f"--vmm_neighbours_dir={folder}",
        ]  # fmt: skip
        address = stack.enter_context(Server(flags, log=folder / "log")).address
        poor = Neighbours(device_folder("cpu", folder), model_id="bench", device="cpu")
        stack.callback(poor.close)
        asked, ordered = [], []
        for number in range(repeats):
            asked.append(_ask(address, poor, number))
            ordered.append(_limit(address, repeats + number))
        yield Row("reaction", "64 MiB of a neighbour at rest, asked for", statistics.median(asked), "ms", bar=40.0)
        yield Row("reaction", "64 MiB of a server at rest, by a limit", statistics.median(ordered), "ms", bar=20.0)


def measure_peers(*, times: int) -> Iterator[Row]:
    """Rows with the median of `times` readings of all status pages, and how long one without an owner is shown."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = []
        for number in range(ENGINES):
            status = Status(engine=f"bench-{number}", pid=os.getpid(), model_id=f"model-{number}", device="cpu")
            files.append(StatusFile(folder, status))
            stack.callback(files[-1].close)
        read = p50(lambda: read_statuses(folder), times)
        yield Row("peers", f"the state of {ENGINES} engines", read, "us", bar=2000.0)
        page = files[0].path.read_bytes()
        files[0].close()
        files[0].path.write_bytes(page)  # as after kill -9: the page is there, its lock is not
        begin = time.perf_counter()
        while len(read_statuses(folder)) == ENGINES:
            pass
        yield Row("peers", "until a dead engine is not shown", 1e3 * (time.perf_counter() - begin), "ms", bar=1000.0)


def _ask(rich: Address, poor: Neighbours, seed: int) -> float:
    """Milliseconds until that much is free."""
    _remember(rich, seed)
    before = memory(rich)["physical"]
    started = time.perf_counter()
    if poor.ask(ASKED) != ASKED:
        raise XllmError(f"the server shows less than {ASKED} idle bytes")
    given = 0
    while given < ASKED and time.perf_counter() - started < ANSWER_SECONDS:
        select.select([poor], [], [], ANSWER_SECONDS)
        given += poor.receive()[1]
    took = 1e3 * (time.perf_counter() - started)
    while memory(rich)["physical"] > before - ASKED and time.perf_counter() - started < ANSWER_SECONDS:
        time.sleep(0.01)  # it answers first, and then reports
    left = before - memory(rich)["physical"]
    if given != ASKED or left < ASKED:
        raise XllmError(f"of {ASKED} bytes asked for, {given} were given and {left} left")
    return took


def _limit(rich: Address, seed: int) -> float:
    """The milliseconds that the order reports."""
    _remember(rich, seed)
    done = order(rich, "/vmm/limit", {"bytes": REMEMBERED - ASKED})
    order(rich, "/vmm/limit", {"bytes": 0})
    return float(done["milliseconds"])


def _remember(address: Address, seed: int) -> None:
    """Leave REMEMBERED bytes of one prompt's KV cached, and nothing else."""
    order(address, "/vmm/trim", {})
    prompt = [(seed * 31 + place * 7) % TOKEN_IDS for place in range(REMEMBERED // BYTES_PER_TOKEN)]
    asyncio.run(complete(address, prompt, 1))
