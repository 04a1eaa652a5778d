"""Which block is taken next, and that every block is exactly one of free, held and cached."""

from __future__ import annotations

import random

import pytest
from cache_ops import spec_of

from xllm_cli.cache.blocks import CACHED, COLD, HELD, PADDING, READY, BlockPool
from xllm_cli.cache.pages import runs_of
from xllm_cli.cache.physical import AlwaysResident
from xllm_cli.cache.residency import Residency


def make_pool(*widths: int, page_bytes: int = 8, num_blocks: int = 64, padding: bool = False) -> BlockPool:
    residency = Residency(spec_of(*widths), page_bytes=page_bytes, spare_pages=100)
    return BlockPool(residency, num_blocks=num_blocks, padding=padding)


def take(pool: BlockPool, count: int, pages: int = 1000) -> list[int]:
    """Ready blocks first, then cold ones that cost at most `pages`, as the allocator does."""
    taken = pool.take_ready(min(count, pool.num_ready), -1)
    cold = pool.find_cold(count - len(taken), pages)
    pool.take_runs(cold.runs)
    pool.settle_pages()
    return taken + [block for run in cold.runs for block in range(*run)]


def free(pool: BlockPool, blocks: list[int]) -> None:
    assert pool.drop(blocks, {}) == []


def cache(pool: BlockPool, blocks: list[int]) -> None:
    assert pool.drop(blocks, dict.fromkeys(blocks)) == blocks


def test_runs_of_joins_consecutive_ids() -> None:
    assert runs_of([3, 4, 5, 9, 2, 3]) == [(3, 6), (9, 10), (2, 4)]
    assert runs_of([]) == []


def test_nothing_is_activated_before_it_is_used() -> None:
    pool = make_pool(2, num_blocks=1 << 40)
    assert pool.activated == 0
    assert take(pool, 1) == [0]
    assert pool.activated == 4, "the page's other blocks are ready now"
    pool.check()


def test_opening_a_page_makes_its_other_blocks_ready() -> None:
    pool = make_pool(2)
    take(pool, 1)
    assert (pool.num_ready, pool.num_held) == (3, 1)
    assert [pool.state(block) for block in range(6)] == [HELD, READY, READY, READY, COLD, COLD]


def test_a_straddling_block_is_cold_until_both_pages_are_present() -> None:
    pool = make_pool(3)
    assert take(pool, 2) == [0, 1]
    assert pool.state(2) == COLD
    assert take(pool, 1) == [2]
    assert [pool.state(block) for block in (3, 4, 5)] == [READY, READY, COLD]


def test_free_blocks_on_the_fullest_page_come_first() -> None:
    pool = make_pool(2)
    take(pool, 12)
    free(pool, [0, 1, 5, 8, 9, 10])
    assert take(pool, 1) == [5], "page 1 holds three"
    assert sorted(take(pool, 2)) == [0, 1], "then page 0 holds two"
    assert take(pool, 1)[0] in (8, 9, 10)


def test_cold_blocks_are_taken_by_lowest_id() -> None:
    pool = make_pool(8)
    assert take(pool, 4) == [0, 1, 2, 3]
    residency = pool._residency
    free(pool, [2, 1])
    residency.give_up_pages(2)
    pool.settle_pages()
    assert pool.find_cold(3, 1000).runs == [(1, 3), (4, 5)]


def test_cold_stops_at_the_pages_that_may_be_spent() -> None:
    pool = make_pool(2)
    assert pool.find_cold(100, 2).num_blocks == 8
    assert pool.find_cold(100, 0).num_blocks == 0
    assert pool.find_cold(3, 2).runs == [(0, 3)]
    assert pool.activated == 0


def test_cold_spends_for_every_tensor() -> None:
    pool = make_pool(4, 4, 1)
    assert pool.find_cold(100, 3).num_blocks == 2
    assert pool.find_cold(100, 5).num_blocks == 4


def test_ids_end_at_num_blocks() -> None:
    pool = make_pool(2, num_blocks=5)
    assert take(pool, 9) == [0, 1, 2, 3, 4]
    assert pool.find_cold(1, 1000).num_blocks == 0
    free(pool, [3])
    assert take(pool, 1) == [3]
    pool.check()


def test_references_are_counted() -> None:
    pool = make_pool(2)
    (block,) = take(pool, 1)
    pool.retain(block)
    free(pool, [block])
    assert (pool.references(block), pool.state(block)) == (1, HELD)
    free(pool, [block])
    assert (pool.references(block), pool.state(block)) == (0, COLD), "its page was never mapped"
    with pytest.raises(AssertionError, match="once too often"):
        free(pool, [block])


def test_a_shared_block_is_held_once_however_many_share_it() -> None:
    pool = make_pool(2)
    (block,) = take(pool, 1)
    pool.retain(block)
    assert pool.num_held == 1
    free(pool, [block])
    assert pool.num_held == 1
    free(pool, [block])
    assert pool.num_held == 0
    pool.check()


def test_cached_blocks_keep_their_page_and_can_be_held_again() -> None:
    pool = make_pool(8)
    (block,) = take(pool, 1)
    cache(pool, [block])
    assert (pool.state(block), pool.num_cached, pool._residency.spare_pages) == (CACHED, 1, 0)
    pool.retain(block)
    assert (pool.state(block), pool.num_cached, pool.num_held) == (HELD, 0, 1)
    pool.check()


def test_padding_is_block_zero_and_always_live() -> None:
    pool = make_pool(2, padding=True)
    assert (pool.state(0), pool.first_block, pool.num_held) == (PADDING, 1, 0)
    taken = take(pool, 5)
    assert taken == [1, 2, 3, 4, 5]
    free(pool, taken)
    assert pool._residency.missing_pages == 1, "the padding block's page is still wanted"
    pool.check()


def test_a_page_is_held_by_a_block_that_begins_before_it() -> None:
    pool = make_pool(3)
    take(pool, 5)
    cache(pool, [3, 4])
    assert pool.is_page_held(1), "block 2 reaches into page 1"
    cache(pool, [2])
    assert not pool.is_page_held(1)


def test_idle_pages_are_ordered_by_how_long_they_are_idle() -> None:
    pool = make_pool(4)
    take(pool, 6)
    for blocks in ([2, 3], [0], [4, 5], [1]):
        cache(pool, blocks)
    assert pool.idle_groups() == [1, 2, 0]
    pool.retain(2)
    assert pool.idle_groups() == [2, 0]


def test_the_physical_cache_takes_lowest_ids_and_costs_no_page() -> None:
    pool = BlockPool(AlwaysResident(spec_of(7), num_blocks=10), num_blocks=10)
    assert take(pool, 4, pages=0) == [0, 1, 2, 3]
    free(pool, [1])
    assert take(pool, 2, pages=0) == [1, 4]
    assert len(take(pool, 100, pages=0)) == 5
    pool.check()


def test_check_notices_a_page_counted_twice() -> None:
    pool = make_pool(2)
    take(pool, 2)
    pool._residency.books.retain(1, 2)
    with pytest.raises(AssertionError, match="differ from a recount"):
        pool.check()


@pytest.mark.parametrize("block", [5, -1, 64, 1 << 40])
def test_what_is_not_held_is_not_given_back(block: int) -> None:
    pool = make_pool(2)
    take(pool, 2)
    with pytest.raises(AssertionError, match=f"block {block} "):
        free(pool, [block])
    with pytest.raises(AssertionError, match=f"block {block} "):
        pool.retain(block)


def test_a_block_that_is_held_cannot_be_taken() -> None:
    pool = make_pool(2)
    take(pool, 2)
    with pytest.raises(AssertionError, match="block 1 is not free"):
        pool.take_runs([(1, 3)])


def test_the_page_of_a_near_block_comes_first() -> None:
    pool = make_pool(2)
    take(pool, 12)
    free(pool, [1, 6, 7, 9])
    assert pool.take_ready(1, 4) == [6], "page 1 is the emptiest, and block 4 is there"
    assert pool.take_ready(2, 4) == [7, 1], "then the fullest"


@pytest.mark.parametrize("widths", [(2,), (3,), (8,), (11,), (3, 3, 1), (20, 3)])
def test_random_operations_lose_and_duplicate_no_block(widths: tuple[int, ...]) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng, pool = random.Random(seed), make_pool(*widths, num_blocks=60)
    held: list[int] = []
    cached: list[int] = []
    for _ in range(300):
        count = rng.randrange(1, 9)
        choice = rng.random()
        if choice < 0.45:
            taken = take(pool, count, pages=rng.choice((0, 2, 1000)))
            assert len(set(taken)) == len(taken) and set(taken).isdisjoint(held + cached)
            held += taken
        elif choice < 0.75:
            gone, held = held[:count], held[count:]
            free(pool, gone)
        elif choice < 0.9:
            idle, held = held[-count:], held[:-count]
            cache(pool, idle)
            cached += idle
        else:
            gone, cached = cached[:count], cached[count:]
            pool.forget(gone)
            pool._residency.give_up_pages(count)
            pool.settle_pages()
        rng.shuffle(held)
        pool.check()
    assert (pool.num_held, pool.num_cached) == (len(held), len(cached))
