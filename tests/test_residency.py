"""Which pages are wanted, mapped and spared, for blocks of any width on pages of any size."""

from __future__ import annotations

import random

import pytest
from cache_ops import spec_of

from xllm_cli._blocks import BlockList, Widths
from xllm_cli.cache.blocks import BlockPool
from xllm_cli.cache.pages import WidthPages
from xllm_cli.cache.physical import AlwaysResident
from xllm_cli.cache.residency import Residency
from xllm_cli.core import PageDelta, PageRef


def residency_of(*widths: int, page_bytes: int = 4, spare_pages: int = 100) -> Residency:
    return Residency(spec_of(*widths), page_bytes=page_bytes, spare_pages=spare_pages)


def settle(residency: Residency, now: float = 0.0, *, failed: tuple[PageRef, ...] = ()) -> PageDelta:
    """Plan a delta and do it, save the unmaps in `failed`."""
    residency.expire(now)
    delta = residency.delta(now)
    unmapped = [ref for ref in delta.unmap if ref not in failed]
    residency.apply(mapped=delta.map, unmapped=unmapped, failed=[ref for ref in delta.unmap if ref in failed])
    return delta


def pages(*numbers: int, tensor: int = 0) -> tuple[PageRef, ...]:
    return tuple(PageRef(tensor, page) for page in numbers)


# --- arithmetic


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 7, 8, 12, 13])
def test_page_arithmetic_agrees_with_bytes(width: int) -> None:
    of = WidthPages(width, 4, (0,))
    for block in range(40):
        touched = {byte // 4 for byte in range(block * width, (block + 1) * width)}
        assert touched == set(range(of.first_page(block), of.last_page(block) + 1))
        assert all(block in range(*of.blocks_of(page)) for page in touched)
        assert sum(of.overlap(page, block) for page in range(200)) == width


@pytest.mark.parametrize("width", [1, 3, 4, 5, 13])
def test_a_run_counts_once_on_every_page_that_each_of_its_blocks_touches(width: int) -> None:
    of = WidthPages(width, 4, (0,))
    for start, stop in ((0, 1), (0, 9), (3, 4), (2, 30)):
        counts = WidthPages(width, 4, (0,)).counts
        Widths([counts]).retain(start, stop)
        for page in range(of.last_page(stop - 1) + 2):
            expected = sum(page in range(of.first_page(b), of.last_page(b) + 1) for b in range(start, stop))
            assert counts.live(page) == expected


@pytest.mark.parametrize(("width", "page"), [(1, 4), (3, 4), (4, 4), (1, 1)])
def test_groups_partition_the_blocks(width: int, page: int) -> None:
    blocks = BlockList(1000, width, page, Widths([]))
    for group in range(20):
        inside = range(blocks.group_start(group), blocks.group_start(group + 1))
        assert inside and all(blocks.group(block) == group for block in inside)


# --- wanted and mapped


def test_a_straddling_block_wants_both_of_its_pages() -> None:
    residency = residency_of(3)
    residency.retain(1, 2)
    assert settle(residency).map == pages(0, 1)


def test_a_page_leaves_with_its_last_block() -> None:
    residency = residency_of(3, spare_pages=0)
    residency.retain(0, 3)
    assert settle(residency).map == pages(0, 1, 2)
    residency.release(0, 1)
    assert settle(residency).unmap == ()
    residency.release(1, 2)
    assert settle(residency).unmap == pages(0)
    residency.release(2, 3)
    assert settle(residency).unmap == pages(1, 2)


def test_a_block_larger_than_a_page_spans_its_pages() -> None:
    residency = residency_of(10, spare_pages=0)
    residency.retain(1, 2)
    assert settle(residency).map == pages(2, 3, 4)
    residency.release(1, 2)
    assert settle(residency).unmap == pages(2, 3, 4)


def test_tensors_of_equal_width_share_counts_and_move_together() -> None:
    residency = residency_of(2, 2, 1)
    residency.retain(0, 3)
    assert len(residency.widths) == 2
    assert settle(residency).map == (*pages(0, 1), *pages(0, 1, tensor=1), *pages(0, tensor=2))
    assert residency.mapped_pages == 5


def test_tensors_of_different_widths_come_and_go_together() -> None:
    residency = residency_of(4, 1, spare_pages=0)
    residency.retain(0, 5)
    settle(residency)
    residency.release(0, 4)
    assert settle(residency).unmap == (*pages(0, 1, 2, 3), *pages(0, tensor=1))


def test_freed_and_taken_again_in_one_plan_is_no_call() -> None:
    residency = residency_of(2, spare_pages=0)
    residency.retain(0, 2)
    settle(residency)
    residency.release(0, 2)
    residency.retain(1, 2)
    assert not settle(residency)


def test_only_an_acknowledgement_changes_what_is_mapped() -> None:
    residency = residency_of(2)
    residency.retain(0, 4)
    assert residency.delta(0.0) == residency.delta(0.0)
    assert residency.mapped_pages == 0 and not residency.is_mapped(PageRef(0, 0))
    residency.release(0, 4)
    assert not residency.delta(0.0)


def test_a_page_wanted_again_while_it_leaves_is_mapped_next() -> None:
    residency = residency_of(2, spare_pages=0)
    residency.retain(0, 2)
    settle(residency)
    residency.release(0, 2)
    residency.expire(0.0)
    delta = residency.delta(0.0)
    residency.retain(0, 1)
    residency.apply(mapped=(), unmapped=delta.unmap, failed=())
    assert residency.delta(0.0).map == pages(0)


# --- spares


def test_a_spare_is_kept_a_second_and_then_leaves() -> None:
    residency = residency_of(2)
    residency.retain(0, 4)
    settle(residency, 10.0)
    residency.release(0, 4)
    assert not settle(residency, 10.9)
    assert residency.next_deadline(10.9) == pytest.approx(11.0)
    assert settle(residency, 11.0).unmap == pages(0, 1)
    assert residency.next_deadline(11.0) is None


def test_more_spares_than_the_bound_leave_at_once_oldest_first() -> None:
    residency = residency_of(4, spare_pages=2)
    residency.retain(0, 5)
    settle(residency)
    for block in (3, 0, 4, 1):
        residency.release(block, block + 1)
    assert settle(residency).unmap == pages(0, 3)


def test_a_spare_used_again_costs_no_call() -> None:
    residency = residency_of(2)
    residency.retain(0, 4)
    settle(residency)
    residency.release(0, 4)
    residency.retain(2, 3)
    assert residency.spare_pages == 1 and not settle(residency)


def test_giving_up_frees_at_least_as_many_pages_as_asked() -> None:
    residency = residency_of(4, 4, 1)
    residency.retain(0, 4)
    settle(residency)
    residency.release(0, 4)
    residency.give_up_pages(3)
    assert (residency.leaving_pages, residency.spare_pages) == (4, 5)


# --- unmaps that fail


def test_a_failed_unmap_is_retried_and_counted() -> None:
    residency = residency_of(4, spare_pages=0)
    residency.retain(0, 1)
    settle(residency)
    residency.release(0, 1)
    for failures in (1, 2, 3):
        assert settle(residency, failed=pages(0)).unmap == pages(0)
        assert residency.unmap_failures == failures and residency.mapped_pages == 1


def test_after_three_failures_a_retry_comes_once_a_second() -> None:
    residency = residency_of(4, spare_pages=0)
    residency.retain(0, 1)
    settle(residency)
    residency.release(0, 1)
    for _ in range(3):
        settle(residency, 5.0, failed=pages(0))
    assert not settle(residency, 5.9) and residency.next_deadline(5.9) == pytest.approx(6.0)
    assert settle(residency, 6.0).unmap == pages(0)
    assert residency.unmap_failures == 0 and residency.mapped_pages == 0


def test_a_stuck_page_is_used_again_without_a_call() -> None:
    residency = residency_of(4, spare_pages=0)
    residency.retain(0, 1)
    settle(residency)
    residency.release(0, 1)
    settle(residency, failed=pages(0))
    residency.retain(0, 1)
    assert not settle(residency)
    residency.check([(0, 1)])


def test_one_tensor_stuck_maps_the_others_only() -> None:
    residency = residency_of(4, 4, 4, spare_pages=0)
    residency.retain(0, 1)
    settle(residency)
    residency.release(0, 1)
    settle(residency, failed=pages(0, tensor=1))
    assert residency.mapped_pages == 1 and residency.is_mapped(PageRef(1, 0))
    residency.retain(0, 1)
    assert settle(residency).map == (PageRef(0, 0), PageRef(2, 0))


# --- costs and accounts


def test_a_cold_block_costs_each_absent_page_once() -> None:
    residency = residency_of(3, 3)
    residency.retain(0, 1)
    pool = BlockPool(residency, num_blocks=30)
    found = [pool.find_cold(count, pages) for count, pages in ((9, 0), (9, 2), (9, 3), (9, 4), (2, 9))]
    assert found == [([(0, 1)], 1), ([(0, 2)], 2), ([(0, 2)], 2), ([(0, 4)], 4), ([(0, 2)], 2)]


def test_a_spare_given_up_costs_as_if_it_were_absent() -> None:
    residency = residency_of(4)
    residency.retain(0, 3)
    settle(residency)
    pool = BlockPool(residency, num_blocks=30)
    residency.release(1, 3)
    assert pool.find_cold(9, 1) == ([(0, 4)], 4)
    assert pool.find_cold(9, 1, gone={(0, 1), (0, 2)}) == ([(0, 2)], 2)


def test_packed_blocks_is_the_most_whose_pages_fit() -> None:
    residency = residency_of(3, 1)
    for nbytes in range(0, 200, 3):
        most = residency.packed_blocks(nbytes)
        assert residency.pages_of([(0, most)] if most else []) * 4 <= nbytes
        assert residency.pages_of([(0, most + 1)]) * 4 > nbytes


def test_unmapped_parts_are_the_bytes_on_missing_pages() -> None:
    residency = residency_of(3, 3)
    residency.retain(0, 1)
    settle(residency)
    residency.retain(1, 2)
    assert sorted(residency.unmapped_parts()) == [(1, 4), (2, 4)], "2 bytes of each block in each tensor"


def test_the_physical_cache_never_moves() -> None:
    residency = AlwaysResident(spec_of(3, 5), num_blocks=10)
    residency.retain(0, 10)
    assert not residency.delta(0.0) and residency.mapped_bytes == 80
    residency.release(0, 10)
    assert residency.unwanted_bytes == 0 and residency.next_deadline(0.0) is None


@pytest.mark.parametrize("widths", [(4,), (3,), (9,), (3, 3, 2), (13, 1)])
def test_random_runs_agree_with_a_recount(widths: tuple[int, ...]) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    residency, live = residency_of(*widths, spare_pages=3), set[int]()
    for now in range(300):
        start = rng.randrange(30)
        run = range(start, start + rng.randrange(1, 6))
        if live.isdisjoint(run):
            residency.retain(run.start, run.stop)
            live |= set(run)
        elif live.issuperset(run):
            residency.release(run.start, run.stop)
            live -= set(run)
        delta = settle(residency, now / 10)
        if rng.random() < 0.3:
            residency.apply(mapped=(), unmapped=delta.map, failed=())
        residency.check([(block, block + 1) for block in live])
