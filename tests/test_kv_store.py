"""The KV store over several tensors: a delta happens wholly or not at all, and no page leaves under running work."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from itertools import product

import pytest
from driver_kinds import open_kind, peek, poke, run_child

from xllm_cli.core import PageDelta, PageRef
from xllm_cli.vmm.arena import AnonymousRange, Arena
from xllm_cli.vmm.driver import FaultyDriver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.worker.kv_store import DeltaOutcome, PhysicalKvStore, VirtualKvStore

PAGE = 4096
TENSORS, PAGES = 4, 3  # two layers, keys and values apart; pages of each
ALL = tuple(PageRef(tensor, page) for tensor, page in product(range(TENSORS), range(PAGES)))


class Bench:
    """A store of four arenas over a driver that fails on demand."""

    def __init__(self, *, fixed_pages: int | None = None) -> None:
        self.driver = FaultyDriver(open_kind("small", pages=64))
        self.pool = PagePool(self.driver, page_bytes=PAGE, fixed_pages=fixed_pages)
        self.arenas = [Arena(self.driver, self.pool, PAGES * PAGE) for _ in range(TENSORS)]
        self.fences = 0
        self.store = VirtualKvStore(self.arenas, self.pool, PAGE, fence=self.count_fence)
        self.driver.reset_counts()

    def count_fence(self) -> None:
        self.fences += 1

    def apply(self, *, map: tuple = (), unmap: tuple = (), keep_free: int = 0) -> DeltaOutcome:
        outcome = self.store.apply(PageDelta(map=tuple(map), unmap=tuple(unmap)), keep_free)
        self.pool.check()
        assert self.pool.owned == self.pool.free_handles + self.store.mapped_pages()
        return outcome

    @property
    def mapped(self) -> set[PageRef]:
        return set(self.store.mapped_of(ALL))


def test_a_delta_maps_and_unmaps_over_all_tensors():
    bench = Bench()
    assert bench.apply(map=ALL) == DeltaOutcome(True)
    assert bench.apply(unmap=ALL[:5], map=()) == DeltaOutcome(True)
    assert bench.mapped == set(ALL[5:])
    assert (bench.store.owned_bytes, bench.store.free_handle_bytes) == (12 * PAGE, 5 * PAGE)
    bench.store.trim()
    assert (bench.store.owned_bytes, bench.store.free_handle_bytes) == (7 * PAGE, 0)
    assert bench.store.close()
    assert bench.driver.usage()["handles"] == 0


@pytest.mark.parametrize("shortage", [True, False], ids=["shortage", "error"])
@pytest.mark.parametrize(("verb", "pages"), [("map", 9), ("create", 6)])
def test_a_half_made_delta_is_undone_wherever_it_fails(verb: str, pages: int, shortage: bool):
    for nth in range(1, pages + 1):
        bench = Bench()
        bench.apply(map=ALL[:3])
        bench.driver.reset_counts()
        bench.driver.fail(verb, nth, shortage)
        outcome = bench.apply(unmap=ALL[:3], map=ALL[3:])
        assert (outcome.mapped, outcome.stuck) == (False, ())
        assert "planned" in outcome.shortage
        assert bench.mapped == set()  # the maps are undone, the unmaps stand
        assert bench.apply(map=ALL[3:]) == DeltaOutcome(True)
        assert bench.store.close()


def test_handles_of_leaving_pages_are_the_first_to_be_mapped_again():
    bench = Bench()
    bench.apply(map=ALL[:6])
    bench.driver.reset_counts()
    assert bench.apply(unmap=ALL[:6], map=ALL[6:]) == DeltaOutcome(True)
    assert bench.driver.counts()["create"] == bench.driver.counts()["destroy"] == 0


def test_a_page_that_cannot_be_unmapped_is_stuck_and_keeps_its_bytes():
    bench = Bench()
    bench.apply(map=ALL)
    poke(bench.arenas[1].address + PAGE, b"kept")
    bench.driver.reset_counts()
    bench.driver.fail("unmap", PAGES + 2, False)  # the second page of the second tensor
    assert bench.apply(unmap=ALL) == DeltaOutcome(True, (PageRef(1, 1),))
    assert bench.mapped == {PageRef(1, 1)}
    assert peek(bench.arenas[1].address + PAGE, 4) == b"kept"
    assert bench.apply(unmap=(PageRef(1, 1),)) == DeltaOutcome(True)


def test_a_page_stuck_in_the_undo_is_reported_among_the_stuck():
    bench = Bench()
    bench.driver.fail("map", 2 * PAGES + 1, False)  # two tensors are mapped when the third fails
    bench.driver.fail("unmap", 4, False)
    outcome = bench.apply(map=ALL)
    assert (outcome.mapped, set(outcome.stuck)) == (False, bench.mapped)
    assert len(outcome.stuck) == 1


def test_a_fixed_pool_that_is_short_changes_nothing_and_says_how_many():
    bench = Bench(fixed_pages=7)
    outcome = bench.apply(map=ALL)
    assert (outcome.mapped, bench.mapped, bench.pool.free_handles) == (False, set(), 7)
    assert "7 in use" in outcome.shortage
    bench.store.trim()
    assert bench.pool.owned == 7


def test_growth_leaves_free_what_must_stay_free():
    bench = Bench()
    outcome = bench.apply(map=ALL, keep_free=60 * PAGE)  # of 64
    assert (outcome.mapped, bench.pool.owned) == (False, 0)
    assert str(60 * PAGE) in outcome.shortage
    assert bench.apply(map=ALL, keep_free=52 * PAGE).mapped


def test_only_an_unmap_waits_for_the_device():
    bench = Bench()
    bench.apply(map=ALL)
    bench.apply()
    assert bench.fences == 0
    bench.apply(unmap=ALL)
    assert bench.fences == 1


def test_a_physical_store_has_no_page_changes():
    store = PhysicalKvStore([AnonymousRange(8 * PAGE)])
    assert store.apply(PageDelta(), 0) == DeltaOutcome(True)
    assert (store.owned_bytes, store.free_handle_bytes) == (0, 0)
    assert store.close()


@pytest.mark.parametrize("verb", ["unmap", "destroy", "release"])
def test_closing_says_when_the_device_kept_something_and_tries_again(verb: str):
    bench = Bench()
    bench.apply(map=ALL)
    bench.driver.reset_counts()
    bench.driver.fail(verb, 1, False)
    assert not bench.store.close()
    assert bench.store.close()
    assert (bench.driver.usage()["handles"], bench.driver.usage()["ranges"]) == (0, 0)


# --- the fence, in a process that may die


def read_while_unmapping(fence: str) -> None:
    """A thread reads a page, as a device would; meanwhile the page is to be unmapped."""

    driver = open_kind("small")
    pool = PagePool(driver, page_bytes=PAGE)
    arena = Arena(driver, pool, PAGE)
    done, began = threading.Event(), threading.Event()
    store = VirtualKvStore([arena], pool, PAGE, fence=done.wait if fence == "waits" else lambda: None)
    store.apply(PageDelta(map=(PageRef(0, 0),)), 0)

    def work() -> None:
        deadline = time.monotonic() + (0.5 if fence == "waits" else 20)  # without, it does not live to see it
        while time.monotonic() < deadline:
            ctypes.string_at(arena.address, 8)
            began.set()
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    began.wait(10)
    assert store.apply(PageDelta(unmap=(PageRef(0, 0),)), 0) == DeltaOutcome(True)
    print("unmapped, work done:", done.is_set())
    thread.join()
    sys.exit(0 if store.close() else 1)


def test_with_the_fence_an_unmap_waits_for_running_work():
    child = run_child("test_kv_store.read_while_unmapping", "waits")
    assert (child.returncode, child.stdout) == (0, "unmapped, work done: True\n"), child.stderr


def test_without_the_fence_the_work_reads_what_is_gone_and_dies():
    child = run_child("test_kv_store.read_while_unmapping", "none")
    assert child.returncode == -signal.SIGSEGV, (child.stdout, child.stderr)
