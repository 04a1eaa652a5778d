"""A block under work is never unmapped nor given away: every interleaving of a pipeline, to a depth of eight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from cache_ops import Clock, FakeRanks, make_cache, run_delta, spec_of

from xllm_cli.cache.blocks import BlockTable
from xllm_cli.cache.manager import CacheManager
from xllm_cli.core import PageRef

DEPTH = 8
OPERATIONS = ("admit", "submit", "retire", "finish", "forget", "rest")
PROMPTS = ([1] * 9, [1] * 5 + [2] * 4)
"""They share their first block of four tokens."""


class Pipeline:
    """Two sequences at most, and batches in flight that hold what they refer to."""

    def __init__(self, depth: int) -> None:
        self.depth, self.clock = depth, Clock()
        self.cache: CacheManager = make_cache(spec_of(64), pages=8, spare_pages=1, options={"clock": self.clock})
        self.ranks = FakeRanks(64)
        self.cache.observe(self.ranks.observe())
        self.tables: list[tuple[BlockTable, list[int]]] = []
        self.batches: deque[tuple[int, tuple[int, ...]]] = deque()
        self.admitted = 0

    def enabled(self) -> Iterator[str]:
        """What may happen next."""
        possible = {
            "admit": len(self.tables) < 2,
            "submit": bool(self.tables) and len(self.batches) < self.depth,
            "retire": bool(self.batches),
            "finish": bool(self.tables),
        }
        return (operation for operation in OPERATIONS if possible.get(operation, True))

    def do(self, operation: str) -> None:
        """One operation; then what is in flight must be mapped, and nobody else's to write."""
        getattr(self, operation)()
        flying = {block for _, blocks in self.batches for block in blocks}
        assert self.ranks.mapped.issuperset(PageRef(0, block) for block in flying), "unmapped under a batch"

    def admit(self) -> None:
        table, tokens = self.cache.open(), PROMPTS[self.admitted % 2]
        flying = {block for _, blocks in self.batches for block in blocks}
        self.cache.match(table, tokens)
        shared = set(table.blocks)
        if not self.cache.grow(table, len(tokens)):
            self.cache.release(table)  # it waits
            return
        assert flying.isdisjoint(set(table.blocks) - shared), "given away under a batch"
        self.tables.append((table, tokens))
        self.admitted += 1
        self.step()

    def submit(self) -> None:
        table, tokens = self.tables[-1]
        self.batches.append((self.cache.hold(table.blocks), tuple(table.blocks)))
        self.cache.publish(table, tokens, len(tokens))

    def retire(self) -> None:
        self.cache.drop(self.batches.popleft()[0])

    def finish(self) -> None:
        self.cache.release(self.tables.pop(0)[0])

    def forget(self) -> None:
        self.cache.forget_all()
        self.step()

    def rest(self) -> None:
        self.clock.now += 2
        self.step()

    def step(self) -> None:
        run_delta(self.cache, self.ranks, self.clock.now)

    def state(self) -> tuple[object, ...]:
        """Equal states have equal futures."""
        pool = self.cache._pool
        tables = tuple(
            (tuple(table.blocks), table.num_published, table.epoch, id(tokens)) for table, tokens in self.tables
        )
        references = tuple(pool.references(block) for block in range(pool.activated))
        flying = tuple(blocks for _, blocks in self.batches)
        epoch = self.cache._index.epoch
        return tables, flying, pool.states(), references, frozenset(self.ranks.mapped), epoch, self.admitted % 2


def replay(depth: int, path: tuple[str, ...]) -> Pipeline:
    pipeline = Pipeline(depth)
    for operation in path:
        pipeline.do(operation)
    return pipeline


def explore(depth: int) -> int:
    """Walk every path of up to DEPTH operations, each state once; returns how many states there are."""
    seen: set[tuple[object, ...]] = set()
    level: list[tuple[str, ...]] = [()]
    for _ in range(DEPTH + 1):
        following = []
        for path in level:
            pipeline = replay(depth, path)
            if (state := pipeline.state()) not in seen:
                seen.add(state)
                pipeline.cache.check()
                following += [(*path, operation) for operation in pipeline.enabled()]
        level = following
    return len(seen)


@pytest.mark.parametrize(
    "depth", [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_nothing_in_flight_is_unmapped_or_given_away(depth: int) -> None:
    assert explore(depth) > 200


def test_a_batch_that_holds_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheManager, "hold", lambda cache, blocks: 0)
    monkeypatch.setattr(CacheManager, "drop", lambda cache, hold: None)
    with pytest.raises(AssertionError, match="under a batch"):
        explore(2)
