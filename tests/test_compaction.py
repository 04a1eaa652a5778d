"""Idle blocks are moved together: what leaves, what stays findable, and that nothing moves in vain."""

from __future__ import annotations

import random

import pytest
from cache_ops import Clock, FakeRanks, make_cache, run_delta, spec_of

from xllm_cli.cache import compaction
from xllm_cli.cache.manager import CacheManager
from xllm_cli.core import PageDelta

PAGE = 64


class Bench:
    """A cache of four blocks a page, with prompts of one block each."""

    def __init__(self, *widths: int, pages: int = 64, spare_pages: int = 0, **how: object) -> None:
        self.clock = Clock()
        self.cache: CacheManager = make_cache(
            spec_of(*widths or (16,)), pages=pages, spare_pages=spare_pages, options={"clock": self.clock}, **how
        )
        self.ranks = FakeRanks(PAGE)
        self.cache.observe(self.ranks.observe())

    def fill(self, count: int) -> list[list[int]]:
        """Cache `count` prompts of one full block, one after another."""
        prompts = [[token] * 5 for token in range(count)]
        for prompt in prompts:
            table = self.cache.open()
            assert self.cache.grow(table, 4)
            self.step()
            self.cache.publish(table, prompt, 4)
            self.cache.release(table)
            self.step()
        return prompts

    def thin_out(self, prompts: list[list[int]], keep: int) -> list[list[int]]:
        """Use every `keep`-th prompt once more, and forget the others: holes everywhere."""
        kept = prompts[::keep]
        for prompt in kept:
            table = self.cache.open()
            assert self.cache.match(table, prompt) == 4
            self.cache.release(table)
            self.step()
        self.forget(len(prompts) - len(kept))
        return kept

    def forget(self, count: int) -> None:
        """Forget the blocks that were used longest ago."""
        allocator = self.cache._allocator
        allocator._forget(allocator.index.evict(count))

    def step(self) -> PageDelta:
        return run_delta(self.cache, self.ranks, self.clock.now)

    def rest(self) -> int:
        """Maintenance steps until nothing is due; returns the blocks copied."""
        copied = 0
        for _ in range(100):
            due = self.cache.next_deadline(self.clock.now)
            if due is None:
                return copied
            self.clock.now = max(self.clock.now, due)
            copied += len(self.step().copies)
            self.cache.check()
        raise AssertionError("never at rest")

    def settle(self) -> None:
        """Steps while no time passes: no spare expires, and nothing is moved for the sake of order."""
        for _ in range(50):
            self.step()

    def hits(self, prompts: list[list[int]]) -> int:
        tables = [self.cache.open() for _ in prompts]
        found = sum(self.cache.match(table, prompt) for table, prompt in zip(tables, prompts, strict=True))
        for table in tables:
            self.cache.release(table)
        return found // 4


@pytest.mark.parametrize("widths", [(16,), (24,), (16, 4), (70,), (100, 30)], ids=str)
def test_idle_blocks_end_up_packed_and_all_of_them_are_found(widths: tuple[int, ...]) -> None:
    bench = Bench(*widths)
    kept = bench.thin_out(bench.fill(30), 3)
    bench.rest()
    packed = bench.cache._residency.packed_pages(len(kept)) * PAGE
    assert packed <= bench.cache.bands()["mapped"] <= packed + (len(widths) * PAGE if max(widths) > 16 else 0)
    assert bench.hits(kept) == len(kept)


def test_blocks_at_rest_for_a_second_move_and_not_before() -> None:
    bench = Bench()
    bench.thin_out(bench.fill(16), 4)
    bench.clock.now += 0.1
    assert not bench.step().copies
    due = bench.cache.next_deadline(bench.clock.now)
    assert due is not None and 0.9 <= due - bench.clock.now <= 1.0
    bench.clock.now = due
    assert len(bench.step().copies) == 3
    assert len(bench.step().unmap) == 3 or bench.cache.bands()["kv_spare"]


def test_holes_beside_running_blocks_are_filled_first() -> None:
    bench = Bench()
    prompts = bench.fill(12)
    held = bench.cache.open()
    assert bench.cache.match(held, prompts[5]) == 4
    kept = bench.thin_out(prompts, 5)
    bench.rest()
    assert bench.cache.bands()["mapped"] == PAGE, "the running block's page has room for all"
    assert bench.hits(kept) == len(kept)
    bench.cache.release(held)


def test_running_blocks_never_move() -> None:
    bench = Bench()
    prompts = bench.fill(16)
    tables = [bench.cache.open() for _ in prompts[::4]]
    for table, prompt in zip(tables, prompts[::4], strict=True):
        bench.cache.match(table, prompt)
    before = [list(table.blocks) for table in tables]
    bench.cache.forget_bytes(1 << 20)
    assert bench.rest() == 0
    assert [table.blocks for table in tables] == before and bench.cache.bands()["mapped"] == 4 * PAGE


def test_a_lowered_limit_keeps_the_latest_and_packs_them() -> None:
    bench = Bench()
    prompts = bench.fill(32)
    order = random.Random(5).sample(prompts, 32)
    for prompt in order:
        assert bench.hits([prompt]) == 1
        bench.step()
    bench.cache.set_limit(4 * PAGE)
    bench.rest()
    assert bench.cache.bands()["mapped"] <= 4 * PAGE
    assert bench.hits(order[-16:]) == 16 and bench.hits(order[:16]) == 0


def test_pages_of_this_plan_are_paid_for_at_once_when_the_limit_falls() -> None:
    bench = Bench()
    prompts = bench.fill(16)
    assert bench.cache.grow(bench.cache.open(), 4), "a fifth page"
    assert bench.hits(prompts[::4]) == 4
    bench.forget(12)
    bench.cache.set_limit(4 * PAGE)
    assert bench.cache.over_limit_bytes() == 0
    delta = bench.step()
    assert len(delta.map) == len(delta.unmap) == 1 and bench.cache.bands()["mapped"] == 4 * PAGE


def test_pages_of_this_plan_do_not_wait_for_blocks_to_move() -> None:
    bench = Bench()
    for prompt in bench.fill(16)[::4]:
        assert bench.cache.match(bench.cache.open(), prompt) == 4
    table = bench.cache.open()
    assert bench.cache.grow(table, 4), "a fifth page"
    bench.forget(10)
    bench.cache.set_limit(4 * PAGE)
    assert bench.cache.over_limit_bytes() == PAGE, "no page can leave with the one that comes"
    bench.cache.release(table)
    assert bench.cache.over_limit_bytes() == 0


def test_what_a_neighbour_asks_for_leaves_without_waiting_for_the_spares() -> None:
    bench = Bench()
    prompts = bench.fill(32)
    for prompt in prompts[::2]:
        assert bench.hits([prompt]) == 1
        bench.step()
    assert bench.cache.forget_bytes(4 * PAGE) == 4 * PAGE
    start = bench.clock.now
    while bench.cache.bands()["mapped"] > 4 * PAGE:
        due = bench.cache.next_deadline(bench.clock.now)
        assert due == bench.clock.now == start, "no time passes"
        bench.step()
    assert bench.hits(prompts[::2]) == 16


def test_a_lost_vote_moves_nothing() -> None:
    bench = Bench()
    kept = bench.thin_out(bench.fill(16), 4)
    bench.step()
    bench.clock.now += 1
    delta = bench.cache.plan_delta(bench.clock.now)
    assert delta.copies
    bench.cache.refuse(delta)
    bench.cache.check()
    assert bench.hits(kept) == len(kept)
    bench.clock.now += 2
    bench.rest()
    assert bench.hits(kept) == len(kept)


def test_rows_do_not_give_way_while_pages_are_about_to_be_emptied() -> None:
    bench = Bench()
    prompts = bench.fill(32)
    running = bench.cache.open()
    assert bench.cache.match(running, prompts[31]) == 4
    bench.cache.set_limit(2 * PAGE)
    assert bench.cache.over_limit_bytes() == 0
    bench.rest()
    assert bench.cache.bands()["mapped"] <= 2 * PAGE and bench.cache.over_limit_bytes() == 0
    bench.cache.release(running)


def test_the_physical_cache_has_nothing_to_move() -> None:
    bench = Bench(page_bytes=None, pages=8)
    bench.fill(8)
    bench.clock.now += 5
    assert bench.cache.next_deadline(bench.clock.now) is None and not bench.step()


@pytest.mark.parametrize("spare_pages", [0, 100])
@pytest.mark.parametrize("times", [1, 3, 12])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_promised_leaves_at_once_and_no_page_twice(seed: int, times: int, spare_pages: int) -> None:
    rng = random.Random(seed)
    bench = Bench(*rng.choice([(16,), (24,), (16, 4), (70,), (16, 16, 16)]), spare_pages=spare_pages)
    bench.thin_out(bench.fill(rng.randrange(8, 33)), rng.randrange(2, 5))
    pages = len(bench.ranks.mapped)
    given = 0
    for _ in range(times):
        given += bench.cache.forget_bytes(rng.randrange(1, 4 * PAGE)) // PAGE
        bench.cache.check()
        if rng.random() < 0.3:
            bench.step()
    bench.settle()
    assert given <= pages - len(bench.ranks.mapped)


def test_a_page_of_every_tensor_is_moved_at_once_however_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "MOST_COPY_BYTES", 1)
    bench = Bench(*[16] * 40, pages=400)
    kept = bench.thin_out(bench.fill(16), 2)
    assert bench.cache.forget_bytes(1) == PAGE
    assert len(bench.step().copies) == 4
    assert len(bench.step().unmap) == 2 * 40
    assert bench.hits(kept) == len(kept)
