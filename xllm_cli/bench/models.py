"""`xllm bench models`: five models in memory for two, with sleeping ones making room, beside two that stay and three
that are refused.

Starts one server after the other with the same fixed pool, forks the same models, and sends both the same requests: a
few clients, each asking one model after another, the first far more often than the last. Copies of one checkpoint stand
in for different models: nothing is shared between them.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from xllm_cli.bench.load import Address, LoadError, complete
from xllm_cli.bench.rows import HEADING, Row, line
from xllm_cli.bench.servers import Server, memory, order, unwinding_on_sigterm
from xllm_cli.fetch import fetch

MIB = 1 << 20
FLAGS = ("--enable_vmm_weights=true", "--enable_vmm_kvcache=true", "--block_size=16", "--dtype=bfloat16")
HABITS = ("--auto_sleep=true", "--auto_wake=true")
NAMES = ("first", "second", "third", "fourth", "fifth")
SHARES = (8, 5, 3, 2, 2)  # of the requests
RESIDENT = 2
CACHE_BYTES = 128 * MIB  # for KV, besides the weights of RESIDENT models
CLIENTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 32, 16
SLOW_SECONDS = 120.0


class Seen(NamedTuple):
    """What became of one request: seconds to its first token; None if it was refused."""

    model: str
    first: float | None


@click.command("models", context_settings={"ignore_unknown_options": True})
@click.option("--model", help="checkpoint folder; unset fetches a small one", type=click.Path(exists=True))
@click.option("--requests", default=100, show_default=True, type=click.IntRange(10), help="in all")
@click.argument("server_flags", nargs=-1, type=click.UNPROCESSED)
def command(*, model: str | None, requests: int, server_flags: tuple[str, ...]) -> None:
    """Five models in memory for two, beside two that stay."""
    checkpoint = Path(model or fetch("smollm2-135m-instruct"))
    with unwinding_on_sigterm(), tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder:
        paths = [_copy(checkpoint, Path(folder) / name) for name in NAMES]
        weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
        size = f"--max_cache_size={(RESIDENT - 1) * weights + CACHE_BYTES}"  # the first model's weights come on top
        click.echo(HEADING)
        for case, habits in (("sleeping", HABITS), ("resident", ())):
            flags = [f"--model={paths[0]}", size, f"--vmm_neighbours_dir={folder}", *FLAGS, *habits, *server_flags]
            with Server(flags, log=Path(folder) / f"{case}.log") as server:
                served = [NAMES[0], *(path.name for path in paths[1:] if _fork(server.address, path))]
                seen = asyncio.run(_ask(server.address, requests))
                for row in _rows(case, served, seen, memory(server.address)["physical"]):
                    click.echo(line(row))


def _copy(checkpoint: Path, folder: Path) -> Path:
    """The same files under other names: they cost nothing, and are another checkpoint all the same."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.is_file():
            os.link(file, folder / file.name)
    return folder


def _fork(address: Address, path: Path) -> bool:
    """False if there is no memory for it."""
    try:
        order(address, "/fork_master", {"model_path": str(path)}, SLOW_SECONDS)
    except urllib.error.HTTPError as refused:
        if refused.code != 503:
            raise
        return False
    return True


async def _ask(address: Address, requests: int) -> list[Seen]:
    """All requests, the same ones for every server."""
    numbers = random.Random(7)
    models = numbers.choices(NAMES, SHARES, k=requests)
    waiting = iter([(name, [numbers.randrange(256) for _ in range(PROMPT_TOKENS)]) for name in models])
    seen: list[Seen] = []

    async def client() -> None:
        for name, prompt in waiting:
            try:
                first = (await complete(address, prompt, OUTPUT_TOKENS, model=name)).first
            except LoadError:
                seen.append(Seen(name, None))
            else:
                seen.append(Seen(name, first))

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return seen


def _rows(case: str, served: list[str], seen: list[Seen], held: int) -> Iterator[Row]:
    for name in NAMES:
        mine = [each for each in seen if each.model == name]
        times = sorted(each.first for each in mine if each.first is not None)
        state = "" if name in served else ", not there"
        if times:
            yield Row(case, f"{name}: first token, median of {len(times)}", 1000 * times[len(times) // 2], "ms")
            yield Row(case, f"{name}: first token, the slowest", 1000 * times[-1], "ms")
        yield Row(case, f"{name}{state}: refused of {len(mine)}", len(mine) - len(times), "")
    answered = sum(each.first is not None for each in seen)
    yield Row(case, "requests answered", 100 * answered / len(seen), "%")
    yield Row(case, "memory of the pool", held / MIB, "MiB")
