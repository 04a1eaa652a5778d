"""The cache as the scheduler uses it: what is shared, who gives way when memory is short, what is told about it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from cache_ops import CacheOps, Clock, FakeRanks, make_cache, run_delta, spec_of

from xllm_cli.cache.blocks import BlockTable
from xllm_cli.cache.manager import CacheManager
from xllm_cli.core import CacheSpec, MediaSpan, Observation, PageDelta, PageRef

ONE_PER_PAGE = spec_of(64)
FOUR_PER_PAGE = spec_of(16)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


class Bench:
    """A cache, its ranks and a clock."""

    def __init__(self, spec: CacheSpec = FOUR_PER_PAGE, *, total: int = 1 << 20, **how: Any) -> None:
        self.clock = Clock()
        how["options"] = {"clock": self.clock, **how.get("options", {})}
        self.cache = make_cache(spec, **how)
        self.ranks = FakeRanks(self.cache.page_bytes, total=total)
        self.cache.observe(self.ranks.observe())

    def step(self) -> PageDelta:
        return run_delta(self.cache, self.ranks, self.clock.now)

    def run(self, tokens: list[int], *, publish: bool = True, **how: Any) -> BlockTable:
        """Match, grow, step and publish one sequence, as the scheduler would."""
        table = self.cache.open(**how)
        self.cache.match(table, tokens)
        assert self.cache.grow(table, len(tokens)), "no memory"
        self.step()
        if publish:
            self.cache.publish(table, tokens, len(tokens))
        return table

    def finish(self, *tables: BlockTable) -> None:
        for table in tables:
            self.cache.release(table)
        self.cache.check()


def blocks_of(count: int, token: int) -> list[int]:
    """A prompt of `count` blocks of 4 and one token more, all of them `token`."""
    return [token] * (4 * count + 1)


# --- sharing


def test_a_finished_prompt_is_hit_at_the_same_blocks_and_pages() -> None:
    bench = Bench()
    first = bench.run(PROMPT)
    blocks = list(first.blocks)
    bench.finish(first)
    calls = bench.ranks.calls
    again = bench.cache.open()
    assert bench.cache.match(again, PROMPT) == 8
    assert again.blocks == blocks[:2] and again.cached_tokens == 8
    assert bench.cache.grow(again, 9) and not bench.step()
    assert bench.ranks.calls == calls


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9])
def test_at_least_one_token_is_left_to_compute(length: int) -> None:
    bench = Bench()
    bench.finish(bench.run(PROMPT[:length]))
    covered = bench.cache.match(bench.cache.open(), PROMPT[:length])
    assert covered == (length - 1) // 4 * 4 < length


def test_a_match_goes_on_after_the_blocks_held_already() -> None:
    bench = Bench()
    bench.finish(bench.run(PROMPT))
    table = bench.cache.open()
    assert bench.cache.match(table, PROMPT[:5]) == 4
    assert bench.cache.match(table, PROMPT) == 8
    assert bench.cache.match(table, PROMPT) == 8 and len(table.blocks) == 2
    bench.finish(table)


def test_a_table_that_was_shrunk_matches_its_own_blocks_again() -> None:
    bench = Bench()
    table = bench.run(PROMPT)
    bench.cache.shrink(table, 1)
    assert table.num_published == 1
    assert bench.cache.match(table, PROMPT) == 8 and len(table.blocks) == 2
    bench.finish(table)


def test_a_match_adds_nothing_behind_a_block_of_its_own() -> None:
    bench = Bench()
    other = bench.cache.open()
    assert bench.cache.grow(other, 3)
    bench.finish(bench.run(PROMPT))
    assert bench.cache.match(other, PROMPT) == 0 and len(other.blocks) == 1
    bench.finish(other)


def test_equal_prefixes_in_flight_stay_private_and_free_separately() -> None:
    bench = Bench()
    tables = [bench.cache.open() for _ in range(2)]
    for table in tables:
        assert bench.cache.grow(table, 9)
    bench.step()
    for table in tables:
        bench.cache.publish(table, PROMPT, 9)
    assert set(tables[0].blocks).isdisjoint(tables[1].blocks)
    assert [table.num_published for table in tables] == [2, 2]
    bench.finish(*tables)
    assert bench.cache.bands()["kv_cached"] == 2 * 16, "the second's blocks are free"


def test_only_full_blocks_with_written_kv_are_published() -> None:
    bench = Bench()
    table = bench.cache.open()
    assert bench.cache.grow(table, 9)
    for written, published in ((3, 0), (4, 1), (7, 1), (8, 2), (9, 2)):
        bench.cache.publish(table, PROMPT, written)
        assert table.num_published == published
    bench.finish(table)


def test_salt_and_images_separate_requests() -> None:
    bench = Bench()
    cat, dog = (MediaSpan(start=4, length=4, digest=digest) for digest in (b"cat", b"dog"))
    bench.finish(bench.run(PROMPT, media=[cat]))
    for how, covered in (({"media": [cat]}, 8), ({"media": [dog]}, 4), ({}, 4), ({"salt": "a", "media": [cat]}, 0)):
        table = bench.cache.open(**how)
        assert bench.cache.match(table, PROMPT) == covered
        bench.finish(table)


def test_without_prefix_cache_nothing_is_kept() -> None:
    bench = Bench(prefix_seed=None)
    bench.finish(bench.run(PROMPT))
    assert bench.cache.match(bench.cache.open(), PROMPT) == 0
    assert bench.cache.bands()["kv_cached"] == 0


def test_queries_and_hits_count_once_per_admission() -> None:
    bench = Bench()
    bench.finish(bench.run(PROMPT))
    table = bench.cache.open()
    for _ in range(3):
        bench.cache.match(table, PROMPT)
        bench.cache.release(table)
    bench.cache.match(table, PROMPT)
    assert bench.cache.grow(table, 8) and bench.cache.grow(table, 9)
    counters = bench.cache.counters
    assert (counters.prefix_queries, counters.prefix_hits) == (9 + 9, 8)


def test_lookahead_loses_one_block_at_a_fork_and_waits_for_the_next_token() -> None:
    bench = Bench(options={"lookahead": 1})
    table = bench.run(PROMPT[:8])
    assert table.num_published == 1, "the token after block 1 is not known yet"
    bench.cache.grow(table, 9)
    bench.cache.publish(table, PROMPT, 8)
    assert table.num_published == 2
    bench.finish(table)
    assert bench.cache.match(bench.cache.open(), PROMPT) == 8
    assert bench.cache.match(bench.cache.open(), [*PROMPT[:8], 77, 78]) == 4


# --- inside a plan


def test_provisional_blocks_are_seen_by_the_plan_and_kept_by_publishing_again() -> None:
    bench = Bench()
    first, second = bench.cache.open(), bench.cache.open()
    assert bench.cache.grow(first, 9)
    bench.cache.publish(first, PROMPT, 9, provisional=True)
    assert bench.cache.match(second, PROMPT) == 8
    bench.step()
    bench.cache.publish(first, PROMPT, 9)
    bench.cache.withdraw()
    bench.finish(first, second)
    assert bench.cache.match(bench.cache.open(), PROMPT) == 8


def test_a_rollback_withdraws_what_its_plan_published() -> None:
    bench = Bench()
    first, second = bench.cache.open(), bench.cache.open()
    assert bench.cache.grow(first, 9)
    bench.cache.publish(first, PROMPT, 9, provisional=True)
    bench.cache.match(second, PROMPT)
    bench.cache.withdraw()
    bench.cache.shrink(first, 0)
    bench.finish(second)
    assert bench.cache.match(bench.cache.open(), PROMPT) == 0
    assert not bench.cache.plan_delta(bench.clock.now)


def test_releasing_a_provisional_block_frees_it() -> None:
    bench = Bench()
    table = bench.cache.open()
    assert bench.cache.grow(table, 9)
    bench.cache.publish(table, PROMPT, 9, provisional=True)
    bench.finish(table)
    assert bench.cache.bands()["kv_cached"] == 0
    assert bench.cache.match(bench.cache.open(), PROMPT) == 0


def test_a_refused_delta_leaves_nothing_mapped_and_closes_growth() -> None:
    bench = Bench()
    bench.ranks.refuse = 1.0
    table = bench.cache.open()
    assert bench.cache.grow(table, 9)
    assert bench.step().map and bench.cache.bands()["mapped"] == 0
    bench.cache.shrink(table, 0)
    assert bench.cache.growth_is_closed and not bench.cache.grow(table, 1)
    assert bench.cache.headroom().bytes <= 0 and bench.cache.counters.map_failures == 1
    assert bench.cache.next_deadline(bench.clock.now) == pytest.approx(bench.clock.now + 0.01)
    bench.clock.now += 0.01
    assert bench.cache.grow(table, 1)


def test_growth_closed_still_lets_resident_blocks_be_taken() -> None:
    bench = Bench()
    table = bench.run(PROMPT[:4])
    bench.cache.close_growth(bench.clock.now + 1)
    assert bench.cache.grow(table, 16), "the page has room for three more blocks"
    assert not bench.cache.fits(1) and not bench.cache.grow(table, 17)
    bench.finish(table)


def test_unmaps_stand_when_the_vote_is_lost() -> None:
    bench = Bench(ONE_PER_PAGE, spare_pages=0)
    table = bench.run(PROMPT, publish=False)
    bench.cache.release(table)
    other = bench.cache.open()
    assert bench.cache.grow(other, 20)
    bench.cache.release(table)
    bench.ranks.refuse = 1.0
    bench.cache.shrink(other, 1)
    bench.step()
    assert bench.cache.bands()["mapped"] == 64 == len(bench.ranks.mapped) * 64


def test_a_map_whose_undo_failed_counts_as_mapped() -> None:
    bench = Bench(ONE_PER_PAGE)
    table = bench.cache.open()
    assert bench.cache.grow(table, 8)
    delta = bench.cache.plan_delta(bench.clock.now)
    bench.cache.refuse(delta, stuck=[PageRef(0, 1)])
    assert bench.cache.bands()["mapped"] == 64
    assert bench.cache.plan_delta(bench.clock.now).map == (PageRef(0, 0),)
    bench.cache.check()


def test_three_failed_unmaps_are_unhealthy_until_one_succeeds() -> None:
    bench = Bench(ONE_PER_PAGE, spare_pages=0)
    bench.finish(bench.run([1], publish=False))
    bench.ranks.stick = 1.0
    health = [bool(bench.step()) and bench.cache.is_healthy for _ in range(3)]
    assert health == [True, True, False] and not bench.step()
    bench.ranks.stick = 0.0
    bench.clock.now += 1
    assert bench.step().unmap and bench.cache.is_healthy


# --- who gives way


def test_an_idle_server_takes_a_request_larger_than_what_is_mapped() -> None:
    bench = Bench(ONE_PER_PAGE, pages=50)
    assert bench.cache.fits(50) and not bench.cache.fits(51)
    assert bench.cache.grow(bench.cache.open(), 50 * 4)


def test_a_failed_growth_changes_nothing() -> None:
    bench = Bench(ONE_PER_PAGE, pages=3)
    bench.finish(bench.run(blocks_of(2, 1)))
    table = bench.cache.open()
    bench.cache.match(table, blocks_of(2, 1))
    before, bands = list(table.blocks), bench.cache.bands()
    assert not bench.cache.grow(table, 16)
    assert (table.blocks, bench.cache.bands()) == (before, bands)
    assert bench.cache.counters.evicted_blocks == 0
    bench.finish(table)
    assert bench.cache.match(bench.cache.open(), blocks_of(2, 1)) == 8


def test_as_many_idle_blocks_are_forgotten_as_are_short_and_no_page_moves() -> None:
    bench = Bench(ONE_PER_PAGE, pages=6, spare_pages=0)
    bench.finish(bench.run(blocks_of(3, 1)))
    bench.step()
    calls, table = bench.ranks.calls, bench.cache.open()
    assert bench.cache.grow(table, 5 * 4)
    bench.step()
    assert bench.cache.counters.evicted_blocks == 2
    assert bench.ranks.calls == calls + 3, "three new pages, and two blocks reused where they are"


def test_the_least_recently_used_prefix_is_forgotten_first() -> None:
    bench = Bench(ONE_PER_PAGE, pages=6, spare_pages=0)
    for token in (1, 2):
        bench.finish(bench.run(blocks_of(2, token)))
    bench.finish(bench.run(blocks_of(2, 1)))
    assert bench.cache.grow(bench.cache.open(), 4 * 4)
    assert [bench.cache.match(bench.cache.open(), blocks_of(2, token)) for token in (1, 2)] == [8, 0]


def test_an_evicted_and_reused_block_is_no_hit_for_its_old_prefix() -> None:
    bench = Bench(ONE_PER_PAGE, pages=3)
    bench.finish(bench.run(blocks_of(2, 1)))
    bench.finish(bench.run(blocks_of(2, 2)))
    assert bench.cache.match(bench.cache.open(), blocks_of(2, 1)) == 0


def test_spares_give_way_before_prefixes() -> None:
    bench = Bench(ONE_PER_PAGE, pages=4)
    cached = bench.run(PROMPT[:5])
    bench.finish(cached)
    bench.finish(bench.run(blocks_of(2, 9), publish=False))
    assert bench.cache.bands()["kv_spare"] > 0
    assert bench.cache.grow(bench.cache.open(), 3 * 4)
    assert bench.cache.counters.evicted_blocks == 0


def test_a_spare_that_completes_no_block_is_given_up_for_a_page_that_does() -> None:
    bench = Bench(spec_of(64, 16))
    running = bench.run([1] * 4)
    bench.finish(bench.run([2] * 32, publish=False))
    bench.cache.forget_bytes(9 * 64)
    bench.step()
    assert bench.cache.bands()["kv_spare"] == 64, "the narrow tensor's last page"
    bench.cache.set_limit(3 * 64)
    table = bench.cache.open()
    assert bench.cache.fits(1, table) and bench.cache.grow(table, 4)
    assert len(bench.step().unmap) == 1 and bench.cache.bands()["mapped"] == 3 * 64
    bench.finish(running, table)


def test_whoever_is_alone_clears_a_scattered_cache_and_packs() -> None:
    bench = Bench(spec_of(64, 16), spare_pages=0)
    first, gap, last = (bench.run([token] * length) for token, length in ((1, 4), (2, 13), (3, 4)))
    bench.cache.shrink(gap, 0)
    bench.cache.forget_all()
    for table, token in ((first, 1), (last, 3)):
        bench.cache.release(table)
        bench.finish(bench.run([token] * 5))
    bench.step()
    bench.cache.set_limit(5 * 64)
    table = bench.cache.open()
    assert bench.cache.fits(4) and bench.cache.grow(table, 16)
    bench.step()
    assert bench.cache.bands()["mapped"] == 5 * 64 and not bench.cache.fits(1)
    bench.finish(table)


def test_blocks_in_use_or_under_transfer_survive_an_eviction_storm() -> None:
    bench = Bench(ONE_PER_PAGE, pages=8)
    running, sent = bench.run(blocks_of(1, 1)), bench.run(blocks_of(1, 2))
    hold = bench.cache.hold(sent.blocks[:1])
    kept = {*running.blocks, *sent.blocks[:1]}
    bench.finish(sent)
    for token in range(3, 12):
        storm = bench.run(blocks_of(3, token))
        assert kept.isdisjoint(storm.blocks)
        bench.finish(storm)
    bench.cache.forget_all()
    assert bench.cache.bands()["kv_live"] == len(kept) * 64
    bench.cache.drop(hold)
    bench.finish(running)
    assert bench.cache.bands()["kv_live"] == 0


def test_forgetting_for_a_block_needs_no_headroom() -> None:
    bench = Bench(ONE_PER_PAGE, pages=8)
    bench.finish(bench.run(blocks_of(4, 1)))
    bench.cache.close_growth(bench.clock.now + 9)
    assert bench.cache.grow(bench.cache.open(), 4 * 4)


def test_a_full_cache_turned_over_gives_no_phantom_hit() -> None:
    bench = Bench(pages=8)
    for token in range(30):
        bench.finish(bench.run(blocks_of(5, token)))
        bench.cache.check()
    hits = [bench.cache.match(bench.cache.open(), blocks_of(5, token)) for token in range(22)]
    assert hits == [0] * 22


def test_whoever_is_alone_may_have_everything_that_is_possible() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    bench = Bench(spec_of(64, 3), pages=24, spare_pages=4)
    ops = CacheOps(bench.cache, bench.ranks.apply, bench.ranks.observe, clock=bench.clock, rng=random.Random(seed))
    for _ in range(30):
        for _ in range(20):
            ops.step()
        ops.drain()
        bench.cache.set_limit(None)
        bench.clock.now += 2
        table, most = bench.cache.open(), bench.cache.possible_tokens()
        assert bench.cache.fits(most // 4) and bench.cache.grow(table, most)
        bench.cache.check()
        bench.cache.release(table)


# --- limits and free memory


def test_a_lowered_limit_gives_back_idle_pages_with_the_next_delta() -> None:
    bench = Bench(ONE_PER_PAGE)
    bench.finish(bench.run(blocks_of(4, 1)))
    bench.cache.set_limit(2 * 64)
    assert bench.cache.over_limit_bytes() == 0
    assert len(bench.step().unmap) == 3 and bench.cache.bands()["mapped"] == 2 * 64
    assert bench.cache.headroom()[:2] == (0, "limit")


def test_above_the_limit_rows_must_give_way() -> None:
    bench = Bench(ONE_PER_PAGE)
    tables = [bench.run(blocks_of(2, token)) for token in (1, 2)]
    bench.cache.set_limit(4 * 64)
    assert bench.cache.over_limit_bytes() == 2 * 64
    assert bench.cache.grow(tables[0], 9), "rows that need nothing run"
    bench.cache.release(tables[1])
    assert bench.cache.over_limit_bytes() == 0
    bench.step()
    assert bench.cache.bands()["mapped"] <= 4 * 64


def test_a_neighbour_takes_memory_idle_blocks_leave_and_rows_stay() -> None:
    bench = Bench(ONE_PER_PAGE, total=20 * 64)
    running = bench.run(blocks_of(4, 1))
    bench.finish(bench.run(blocks_of(4, 2)))
    bench.ranks.taken_by_others = 13 * 64
    bench.step()
    assert len(bench.step().unmap) == 3
    assert bench.cache.over_limit_bytes() == 0 and bench.cache.grow(running, 17)
    bench.ranks.taken_by_others = 16 * 64
    bench.step()
    assert not bench.step().map and bench.cache.over_limit_bytes() == 0
    assert not bench.cache.grow(running, 25)


def test_memory_given_back_by_a_neighbour_is_used_again() -> None:
    bench = Bench(ONE_PER_PAGE, total=20 * 64)
    bench.ranks.taken_by_others = 18 * 64
    bench.step()
    assert not bench.cache.fits(3)
    bench.ranks.taken_by_others = 0
    bench.step()
    assert bench.cache.fits(20) and not bench.cache.fits(21)


def test_pages_that_leave_pay_for_pages_that_come() -> None:
    bench = Bench(spec_of(64, 16), pages=5)
    bench.finish(bench.run([1] * 16, publish=False))
    bench.cache.forget_bytes(10 * 64)
    assert bench.cache.grow(bench.cache.open(), 16)
    bench.step()
    assert bench.cache.bands()["mapped"] == 5 * 64


def test_forget_bytes_takes_spares_and_then_whole_idle_pages() -> None:
    bench = Bench()
    running = bench.run(blocks_of(1, 1))
    idle = bench.run(blocks_of(6, 2))
    bench.finish(idle)
    left = []
    for _ in range(3):
        bench.cache.forget_bytes(64)
        left.append(bench.cache.bands()["kv_cached"])
    assert left == [6 * 16, 2 * 16, 2 * 16], "the spare, the page of four cached blocks, and no page that is in use"
    assert len(bench.step().unmap) == 2
    bench.finish(running)


def test_forget_bytes_spares_pages_a_running_sequence_keeps() -> None:
    bench = Bench()
    running, idle = bench.cache.open(), bench.cache.open()
    for count in (4, 8, 12):
        assert bench.cache.grow(running, count) and bench.cache.grow(idle, count)
    bench.step()
    bench.cache.publish(idle, [2] * 12, 12)
    bench.finish(idle)
    shared = {block // 4 for block in running.blocks}
    bench.cache.forget_bytes(1 << 20)
    assert {ref.page for ref in bench.step().unmap}.isdisjoint(shared)
    assert bench.cache.bands()["kv_cached"] > 0
    bench.finish(running)


def test_after_forget_all_old_kv_is_never_published_again() -> None:
    bench = Bench()
    running = bench.run(PROMPT)
    assert bench.cache.forget_all() == 0
    bench.cache.publish(running, PROMPT, 9)
    assert running.num_published == 0 or not running.chain[-1].alive
    other = bench.cache.open()
    assert bench.cache.match(other, PROMPT) == 0 == bench.cache.match(running, PROMPT)
    bench.cache.release(running)
    bench.cache.match(running, PROMPT)
    bench.finish(bench.run(PROMPT), running)
    assert bench.cache.match(other, PROMPT) == 8


def test_a_sequence_whose_prefix_was_evicted_publishes_its_own_copy() -> None:
    bench = Bench(ONE_PER_PAGE, pages=5)
    tables = [bench.cache.open() for _ in range(2)]
    for table in tables:
        assert bench.cache.grow(table, 8)
    bench.step()
    for table in tables:
        bench.cache.publish(table, PROMPT, 8)
    bench.finish(tables[0])
    assert bench.cache.grow(bench.cache.open(), 12), "evicts the first's blocks"
    bench.cache.publish(tables[1], PROMPT, 8)
    bench.cache.release(tables[1])
    assert bench.cache.match(bench.cache.open(), PROMPT) == 8


# --- reports


def test_possible_tokens_are_whole_blocks_on_whole_pages() -> None:
    bench = Bench(spec_of(40), pages=4, page_bytes=64)
    assert bench.cache.possible_bytes() == 4 * 64
    assert bench.cache.possible_tokens() == 6 * 4
    padded = Bench(spec_of(40), pages=4, options={"padding": True})
    assert padded.cache.possible_bytes() == 3 * 64 and padded.cache.possible_tokens() == 5 * 4


def test_bands_add_up_while_pages_are_on_their_way() -> None:
    bench = Bench(spec_of(40, 24))
    table = bench.run(PROMPT)
    bench.cache.grow(table, 40)
    bands = bench.cache.bands()
    assert bands["mapped"] == sum(bands[name] for name in ("kv_live", "kv_cached", "kv_idle", "kv_spare"))
    assert bands["kv_live"] >= 3 * 64 and min(bands.values()) >= 0
    bench.step()
    assert bench.cache.bands()["kv_live"] == 10 * 64
    bench.finish(table)


def test_bands_tell_live_cached_idle_and_spare_apart() -> None:
    bench = Bench()
    cached = bench.run([1] * 5)
    bench.run([2] * 17)
    bench.finish(cached, bench.run([3] * 60, publish=False))
    bands = bench.cache.bands()
    assert bands["kv_live"] == 5 * 16 and bands["kv_cached"] == 16
    assert bands["kv_idle"] == 2 * 64 - 6 * 16 and bands["kv_spare"] == bands["mapped"] - 2 * 64 > 0


def test_the_floor_is_reached_a_second_after_the_last_release() -> None:
    bench = Bench(options={"padding": True}, prefix_seed=None)
    tables = [bench.run(blocks_of(6, token)) for token in range(8)]
    bench.finish(*tables)
    bench.step()
    deadline = bench.cache.next_deadline(bench.clock.now)
    assert deadline is not None and deadline <= bench.clock.now + 1
    bench.clock.now = deadline
    bench.step()
    assert bench.cache.bands()["mapped"] == 64, "the padding block's page"
    assert bench.cache.next_deadline(bench.clock.now) is None


def test_keep_free_and_headroom_take_the_least_rank() -> None:
    bench = Bench(limits={"reserve": 100})
    ranks = [Observation(total=9000, free=free, execution_room=room) for free, room in ((5000, 50), (900, 10))]
    bench.cache.observe(*ranks)
    assert bench.cache.keep_free() == 150
    assert bench.cache.headroom()[:2] == (790, "free_memory")


def test_a_table_without_blocks_can_be_released_and_shrunk() -> None:
    bench = Bench()
    table = bench.cache.open()
    bench.cache.shrink(table, 0)
    bench.finish(table, table)


def test_releasing_twice_frees_once() -> None:
    bench = Bench()
    table = bench.run(PROMPT)
    bench.finish(table, table)
    assert bench.cache.bands()["kv_live"] == 0


def test_the_physical_cache_shares_and_evicts_without_pages() -> None:
    bench = Bench(spec_of(10, 6), page_bytes=None, pages=1)
    assert bench.cache.num_blocks == 4 and bench.cache.possible_tokens() == 16
    bench.finish(bench.run(PROMPT))
    assert bench.cache.match(bench.cache.open(), PROMPT) == 8
    assert bench.cache.grow(bench.cache.open(), 8) and not bench.cache.grow(bench.cache.open(), 1)
    assert not bench.step() and bench.cache.bands()["mapped"] == 64
    assert bench.cache.forget_bytes(100) == 0


# --- everything at random

LAYOUTS = [(24,), (64,), (100,), (24, 24, 8), (128,), (7,), (150, 13), None]


@pytest.mark.parametrize("widths", LAYOUTS, ids=str)
def test_random_operations(widths: tuple[int, ...] | None) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    bench = Bench(
        spec_of(*(widths or (24, 8))),
        pages=rng.choice((20, 40, 80)),
        page_bytes=64 if widths else None,
        limits={"max_cache_size": rng.choice((0, 1300)), "ratio": rng.choice((0.0, 0.5))},
        spare_pages=rng.choice((0, 4, 50)),
        options={"padding": rng.random() < 0.3, "lookahead": rng.randrange(2)},
        total=rng.choice((2500, 5000, 1 << 20)),
    )
    bench.ranks.refuse = bench.ranks.stick = rng.choice((0.0, 0.1))
    ops = CacheOps(bench.cache, bench.ranks.apply, bench.ranks.observe, clock=bench.clock, rng=rng)
    for _ in range(700):
        if rng.random() < 0.02:
            bench.ranks.taken_by_others = rng.choice((0, 0, 500, 2000))
        ops.step()
    assert_drained(ops, bench.cache)


def assert_drained(ops: CacheOps, cache: CacheManager) -> None:
    ops.drain()
    cache.forget_all()
    cache.check()
    bands = cache.bands()
    assert bands["kv_cached"] == 0 and bands["kv_live"] <= 2 * cache.spec.bytes_per_block
