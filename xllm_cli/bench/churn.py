"""Conversations over a cache without a device: what fragmentation a staggered decode leaves, and how many hits remain.

A trace is a function of its seed. Prompts share a few long beginnings, two in five continue an earlier conversation,
lengths are lognormal; a fixed number of sequences decodes one token a step, so that their blocks interleave.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from xllm_cli.cache.blocks import BlockTable
from xllm_cli.cache.budget import Limits
from xllm_cli.cache.manager import CacheManager
from xllm_cli.cache.options import CacheOptions
from xllm_cli.core import CacheSpec, Observation, TensorSpec

PAGE = 2 << 20
BLOCK_SIZE = 16
CONCURRENCY = 64
STEP_SECONDS = 0.02
WIDTHS = {"135M model": (360 << 10, 1024), "8B model": (2304 << 10, 4096), "64 KiB blocks": (64 << 10, 256)}
"""Name → bytes of a block, pages of the arena."""


class Finding(NamedTuple):
    """One number of a churn; see vmm_cases.Row."""

    name: str
    value: float
    unit: str = ""
    floor: float | None = None
    floor_is: str = ""
    bar: float | None = None


class Running:
    """A conversation that decodes until it has `end` tokens."""

    def __init__(self, table: BlockTable, tokens: list[int], end: int) -> None:
        self.table, self.tokens, self.end = table, tokens, end


class Churn:
    """One trace over one cache of `pages` pages: elastic, of a `fixed` pool, or `physical` with as many bytes."""

    def __init__(self, width: int, pages: int, *, seed: int = 3, physical: bool = False, fixed: bool = False) -> None:
        self.now = 0.0
        self.width = width
        self.cache = CacheManager(
            CacheSpec(BLOCK_SIZE, (TensorSpec("kv", width),)),
            limits=Limits(arena_bytes=pages * PAGE, host=False, elastic=not fixed, pool_bytes=pages * PAGE),
            page_bytes=None if physical else PAGE,
            prefix_seed=1024,
            spare_pages=32,
            options=CacheOptions(clock=lambda: self.now),
        )
        self.cache.observe(Observation(total=1 << 44, free=1 << 44, free_handles=pages * PAGE if fixed else 0))
        self.queried = self.hit = self.copied = 0
        self._rng = random.Random(seed)
        self._running: list[Running] = []
        self._heads = [self._draw(1024) for _ in range(24)]
        self._talks: list[list[int]] = []
        self._pending: list[int] | None = None
        self._left = 0

    def run(self, requests: int) -> None:
        """Serve so many; up to CONCURRENCY still run afterwards."""
        self._left = requests
        while self._left > 0:
            self._admit()
            self._decode()

    def drain(self) -> None:
        """Serve what still runs."""
        while self._running:
            self._decode()

    def rest(self) -> None:
        """Maintenance steps until nothing is due."""
        while (due := self.cache.next_deadline(self.now)) is not None:
            self.now = max(self.now, due)
            self._step()

    def end_all_but(self, blocks: int) -> None:
        """End conversations at random until so many blocks are in use; the last one is only cut."""
        while (one := self._rng.choice(self._running)) and self._in_use(but=one) > blocks:
            self._finish(one)
        while self._in_use() > blocks:
            self.cache.shrink(one.table, len(one.table.blocks) - 1)

    def _in_use(self, *, but: Running | None = None) -> int:
        return len({block for one in self._running if one is not but for block in one.table.blocks})

    @property
    def hit_rate(self) -> float:
        return self.hit / self.queried

    @property
    def idle_ratio(self) -> float:
        """Mapped bytes against the same blocks packed."""
        bands = self.cache.bands()
        packed = -(-(bands["kv_live"] + bands["kv_cached"]) // PAGE) * PAGE
        return bands["mapped"] / max(PAGE, packed)

    def _draw(self, count: int) -> list[int]:
        return [self._rng.randrange(1000) for _ in range(count)]

    def _prompt(self) -> list[int]:
        rng, kind = self._rng, self._rng.random()
        if kind < 0.4 and self._talks:
            return self._talks.pop(rng.randrange(len(self._talks))) + self._draw(rng.randrange(20, 120))
        head: list[int] = []
        if kind < 0.8:
            head = self._heads[min(int(rng.expovariate(0.25)), 23)][: rng.choice((256, 512, 1024))]
        return head + self._draw(int(min(2000, max(16, rng.lognormvariate(5.3, 0.8)))))

    def _admit(self) -> None:
        while len(self._running) < CONCURRENCY and self._left > 0:
            tokens = self._pending or self._prompt()
            table = self.cache.open()
            matched = self.cache.match(table, tokens)
            self._pending = None
            if not self.cache.grow(table, len(tokens)):
                self.cache.release(table)
                self._pending = tokens
                return
            self.queried += len(tokens)
            self.hit += matched
            self._left -= 1
            end = len(tokens) + int(min(1000, max(4, self._rng.lognormvariate(4.6, 0.8))))
            self._running.append(Running(table, tokens, end))

    def _decode(self) -> None:
        for one in tuple(self._running):
            if one in self._running:
                one.tokens.append(self._rng.randrange(1000))
                self._make_room(one)
        self._step()
        for one in tuple(self._running):
            self.cache.publish(one.table, one.tokens, len(one.tokens) - 1)
            if len(one.tokens) >= one.end:
                self._finish(one)

    def _make_room(self, one: Running) -> None:
        while not self.cache.grow(one.table, len(one.tokens)):
            youngest = self._running.pop()
            self.cache.release(youngest.table)
            self._left += 1
            if youngest is one:
                return

    def _finish(self, one: Running) -> None:
        self._running.remove(one)
        self.cache.publish(one.table, one.tokens, len(one.tokens) - 1)
        self.cache.release(one.table)
        self._talks.append(one.tokens)
        if len(self._talks) > 60 or len(one.tokens) > 3000:
            self._talks.pop(0)

    def _step(self) -> None:
        self.now += STEP_SECONDS
        delta = self.cache.plan_delta(self.now)
        self.cache.acknowledge(delta)
        self.copied += len(delta.copies)


def measure_churn(requests: int) -> Iterator[Finding]:
    """The findings of every width."""
    for name, (width, pages) in WIDTHS.items():
        yield from _idle(name, width, pages, requests)
        yield from _returned(name, width, pages, requests)
    width, pages = WIDTHS["135M model"]
    yield from _hits(width, pages, requests, 5 if requests > 200 else 1)


def _idle(name: str, width: int, pages: int, requests: int) -> Iterator[Finding]:
    churn = Churn(width, pages)
    churn.run(requests)
    churn.drain()
    churn.rest()
    yield Finding(f"idle bytes / packed, {name}", churn.idle_ratio, bar=1.02)
    full = churn.cache.bands()["mapped"]
    for part in (2, 4, 10):
        churn.cache.set_limit(full // part)
        churn.rest()
        yield Finding(f"the same once limited to 1/{part}", churn.idle_ratio, bar=1.02 if full > 100 * PAGE else None)
    yield Finding("blocks moved for it, of all cached before", churn.copied / max(1, full // width))


def _returned(name: str, width: int, pages: int, requests: int) -> Iterator[Finding]:
    """What was idle before and leaves too is not counted."""
    churn = Churn(width, pages)
    churn.run(requests)
    churn.end_all_but(1000)
    churn.rest()
    before, evicted = churn.cache.bands(), churn.cache.counters.evicted_blocks
    churn.cache.forget_bytes(3584 * width)
    churn.rest()
    after, gone = churn.cache.bands(), (churn.cache.counters.evicted_blocks - evicted) * width
    idle = max(0, _idle_bytes(before) - _idle_bytes(after))
    live = before["kv_live"] // width
    back = before["mapped"] - after["mapped"] - idle
    yield Finding(
        f"evicted bytes not returned beside {live} blocks in use, {name}", 100 - 100 * back / max(1, gone), "%", bar=40
    )


def _idle_bytes(bands: dict[str, int]) -> int:
    return bands["kv_idle"] + bands["kv_spare"]


def _hits(width: int, pages: int, requests: int, traces: int) -> Iterator[Finding]:
    """Medians over traces. A rest after every tenth part gives back and moves what lies scattered."""
    found = [_hit_rates(width, pages, requests, seed) for seed in range(3, 3 + traces)]
    elastic, physical, roomy, unbounded = (list(rates) for rates in zip(*found, strict=True))
    yield Finding("hit rate", median(elastic), "%", median(unbounded), "unbounded")
    yield Finding("hits lost to plain LRU of as many bytes", _lost(elastic, physical), "pp", bar=0.3)
    yield Finding("hits lost to an unbounded cache where all fits", _lost(roomy, unbounded), "pp", bar=0.3)
    yield Finding("hits lost to an unbounded cache, for want of bytes", _lost(elastic, unbounded), "pp")


def _hit_rates(width: int, pages: int, requests: int, seed: int) -> list[float]:
    rates = []
    for room, physical in ((pages, False), (pages, True), (64 * pages, False), (64 * pages, True)):
        churn = Churn(width, room, seed=seed, physical=physical)
        for _ in range(10):
            churn.run(requests // 10)
            churn.drain()
            churn.rest()
        rates.append(100 * churn.hit_rate)
    return rates


def _lost(rates: list[float], to: list[float]) -> float:
    return median(b - a for a, b in zip(rates, to, strict=True))
