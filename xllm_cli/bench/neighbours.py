"""`xllm bench neighbours`: several servers whose peaks do not coincide, on one budget of memory.

Three ways to share it, in the same processes and on the same trace, one after the other:

    shares   every server has its own part of the budget, for ever (a live limit)
    elastic  no parts: who peaks takes what the others only remember
    ample    every server has its own part, of a budget with which parts do as well as elastic

A peak is a set of conversations that fits the whole budget but no part of it; at any moment one server has its peak, so
that what is in use never exceeds the budget. The first turn of each conversation is computed and not counted; a further
turn adds a few tokens to a prompt that is still cached or, a miss, is computed anew. Compared is the time to the first
token of further turns. What happens to one question for 64 MiB is measured by `xllm bench vmm reaction`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from xllm_cli.bench.load import TOKEN_IDS, Address, LoadError, Timing, complete
from xllm_cli.bench.memory_group import MemoryGroup, memory_group
from xllm_cli.bench.servers import Server, memory, order, unwinding_on_sigterm
from xllm_cli.errors import XllmError
from xllm_cli.fetch import fetch

MIB = 1 << 20
OUTPUT_TOKENS = 8
ADDED_TOKENS = 16  # that a further turn says
BLOCK_TOKENS = 16  # so that what a hit leaves to compute is the turn, not the rest of a block
BUDGET = 0.6  # of what all working sets together need: the budget of `shares` and `elastic`
SLACK = 8 * MIB  # by which the budget may be missed: processes breathe


class Peak(NamedTuple):
    """Conversations of `prompt_tokens` each, `at_once` at a time, `turns` counted ones of each."""

    conversations: int
    prompt_tokens: int
    turns: int
    at_once: int

    def prompts(self, seed: int) -> list[list[int]]:
        """What each conversation says from its first turn to its last."""
        numbers, length = random.Random(seed), self.prompt_tokens + self.turns * ADDED_TOKENS
        return [[numbers.randrange(TOKEN_IDS) for _ in range(length)] for _ in range(self.conversations)]


class Outcome(NamedTuple):
    """One way to share: what every further turn took, and how many requests failed."""

    turns: list[Timing]
    failed: int

    def quantile(self, share: float) -> float:
        """The seconds to the first token that `share` of the turns stay below."""
        first = sorted(turn.first for turn in self.turns)
        return first[min(len(first) - 1, int(share * len(first)))]

    @property
    def computed(self) -> int:
        """Prompt tokens that were computed."""
        return sum(turn.computed for turn in self.turns)

    @property
    def misses(self) -> int:
        """Turns of which more was computed than they added."""
        return sum(turn.computed > ADDED_TOKENS + BLOCK_TOKENS for turn in self.turns)


@click.command("neighbours", context_settings={"ignore_unknown_options": True})
@click.option("--model", help="checkpoint folder; unset fetches a small one", type=click.Path(exists=True))
@click.option("--servers", "count", default=3, show_default=True, type=click.IntRange(2, 8))
@click.option("--conversations", default=6, show_default=True, type=click.IntRange(2))
@click.option("--prompt_tokens", default=500, show_default=True, type=click.IntRange(64))
@click.option("--turns", default=6, show_default=True, type=click.IntRange(1), help="counted turns of a conversation")
@click.argument("server_flags", nargs=-1, type=click.UNPROCESSED)
def command(
    *, model: str | None, count: int, conversations: int, prompt_tokens: int, turns: int, server_flags: tuple[str, ...]
) -> None:
    """Servers with staggered peaks on one budget against fixed shares of it. Needs root, for a memory cgroup."""
    peak = Peak(conversations, prompt_tokens, turns, at_once=2)
    with unwinding_on_sigterm(), memory_group() as group:
        flags = [f"--model={model or fetch('smollm2-135m-instruct')}", f"--block_size={BLOCK_TOKENS}", *server_flags]
        with contextlib.ExitStack() as stack:
            addresses = [server.address for server in _start(flags, count, group, stack)]
            for text in Trial(group, addresses, peak).compare():
                click.echo(text)


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
        yield (
            f"{'':8} {'budget MiB':>10} {'p50 ms':>8} {'p99 ms':>8} {'p99 ratio':>9} {'turns':>6} {'missed':>6} "
            f"{'computed':>8} {'asked MiB':>9} {'failed':>6}"
        )
        base = 0.0
        for name, total, is_shared in (("shares", budget, True), ("elastic", budget, False), ("ample", whole, True)):
            asked = self._asked()
            outcome = self._share(total, is_shared=is_shared)
            worst = outcome.quantile(0.99)
            base = base or worst
            yield (
                f"{name:8} {total / MIB:>10.0f} {outcome.quantile(0.5) * 1e3:>8.1f} {worst * 1e3:>8.1f} "
                f"{base / worst:>9.2f} {len(outcome.turns):>6} {outcome.misses:>6} {outcome.computed:>8} "
                f"{(self._asked() - asked) / MIB:>9.0f} {outcome.failed:>6}"
            )

    def _asked(self) -> int:
        return sum(memory(address)["neighbours"]["asked"] for address in self._addresses)

    def _share(self, total: int, *, is_shared: bool) -> Outcome:
        self._empty()
        self._set_budget(total)
        for address in self._addresses:
            order(address, "/vmm/limit", {"bytes": total // len(self._addresses) if is_shared else 0})
        parts = [self._run_peak(address, seed=number) for number, address in enumerate(self._addresses)]
        self._empty()
        return Outcome([turn for part in parts for turn in part.turns], sum(part.failed for part in parts))

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
        return asyncio.run(_talk(address, self._peak, seed))


async def _talk(address: Address, peak: Peak, seed: int) -> Outcome:
    """Every conversation's first turn, then `turns` rounds of the next ones, a few at a time."""
    seats = asyncio.Semaphore(peak.at_once)
    counted: list[Timing] = []
    failures: list[LoadError] = []

    async def turn(prompt: list[int], *, is_counted: bool) -> None:
        async with seats:
            try:
                timing = await complete(address, prompt, OUTPUT_TOKENS)
            except LoadError as error:
                failures.append(error)
                return
        if is_counted:
            counted.append(timing)

    prompts = peak.prompts(seed)
    for number in range(peak.turns + 1):
        length = peak.prompt_tokens + number * ADDED_TOKENS
        await asyncio.gather(*(turn(prompt[:length], is_counted=number > 0) for prompt in prompts))
    return Outcome(counted, len(failures))
