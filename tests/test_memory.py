"""What a rank sees of its memory: the execution room is what steps needed besides the pool's pages, and stays."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import simulated
from checkpoints import tiny_checkpoint
from driver_kinds import open_kind, poke

from xllm_cli import LLM
from xllm_cli.core import Observation, PageDelta, PageRef, Request, SamplingParams
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.driver import Driver, FaultyDriver, VmmError, open_driver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.vmm.simulated import SimulatedAllocator, SimulatedDriver
from xllm_cli.worker.kv_store import VirtualKvStore
from xllm_cli.worker.memory import KEPT_BYTES, MOST_FAILED_READINGS, DeviceMemoryObserver, HostMemoryObserver

MIB = 1 << 20
SPIKE = 96 * MIB
NOISE = 8 * MIB  # the allocator keeps some, the kernel counts in batches
PAGES = 32  # of 2 MiB
TOTAL = 64 * MIB


def spike() -> None:
    """Anonymous memory that is touched and given back at once."""
    np.full(SPIKE, 1, dtype=np.uint8)


def anonymous() -> int:
    """Bytes of this process's anonymous memory."""
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) << 10


def leave_holes(nbytes: int) -> Iterator[None]:
    """First use up what the C library has in hand and cannot give back: the end of a heap that something else lies
    behind. Then leave so many bytes in it that nobody uses, each hole between two small things that stay: what is left
    of a block that was larger, for a small block of its own could lie anywhere."""
    library, size, rest = ctypes.CDLL(None), 100 << 10, 3000  # below what has pages of its own
    library.malloc.restype, library.malloc.argtypes, library.free.argtypes = (
        ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p],
    )  # fmt: skip
    library.realloc.restype, library.realloc.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]

    def take(nbytes: int) -> list[int]:
        blocks = [library.malloc(size) for _ in range(nbytes // size)]
        for block in blocks:
            ctypes.memset(block, 1, size)
        return blocks

    library.malloc_trim(0)
    kept, fresh = [], 0
    while fresh < NOISE:
        before = anonymous()
        kept += take(MIB)
        fresh = fresh + MIB if anonymous() - before > MIB // 2 else 0
    yield
    blocks = [library.realloc(block, rest) for block in take(nbytes)]
    yield
    for block in blocks + kept:
        library.free(block)


class Rank(NamedTuple):
    """A KV store of one arena, and who watches its memory."""

    driver: Driver
    arena: Arena
    store: VirtualKvStore
    observer: HostMemoryObserver


@pytest.fixture
def rank() -> Iterator[Rank]:
    gc.collect()  # what earlier tests left must not go while bytes are counted
    gc.disable()
    spike()  # what loading needed
    driver = open_kind("host-4k", pages=PAGES)
    page_bytes = driver.info().page_bytes
    pool = PagePool(driver, page_bytes=page_bytes)
    arena = Arena(driver, pool, PAGES * page_bytes)
    store = VirtualKvStore([arena], pool, page_bytes, fence=lambda: None)
    made = Rank(driver, arena, store, HostMemoryObserver(driver, store))
    yield made
    gc.enable()
    made.observer.close()
    assert store.close()


def test_what_came_before_the_first_step_is_no_execution_room(rank: Rank):
    assert rank.observer.observe().execution_room < NOISE


def test_a_spike_inside_a_step_raises_the_execution_room_for_good(rank: Rank):
    rooms = []
    for work in (lambda: None, spike, lambda: None, lambda: None):
        rank.observer.begin_step()
        work()
        rooms.append(rank.observer.observe().execution_room)
    assert rooms[0] < NOISE
    assert all(SPIKE - NOISE < room < SPIKE + NOISE for room in rooms[1:])


def test_memory_that_stays_needs_no_room_any_more(rank: Rank):
    rank.observer.begin_step()
    spike()
    before = rank.observer.observe()
    kept = np.full(SPIKE // 2, 1, dtype=np.uint8)
    after = rank.observer.observe()
    assert after.anon - before.anon == pytest.approx(kept.nbytes, abs=NOISE)
    assert after.execution_room == pytest.approx(SPIKE - kept.nbytes, abs=NOISE)


@pytest.mark.parametrize("nbytes", [KEPT_BYTES // 2, 2 * KEPT_BYTES])
def test_what_the_c_library_keeps_is_given_back_when_it_is_much_or_short(rank: Rank, nbytes: int):
    holes = leave_holes(nbytes)
    next(holes)
    rank.observer.begin_step()
    before = rank.observer.observe()
    next(holes)
    full = rank.observer.observe()
    assert full.anon - before.anon == pytest.approx(nbytes, abs=NOISE)
    rank.observer.begin_step()
    kept = rank.observer.observe()
    assert kept.anon - before.anon == pytest.approx(nbytes if nbytes < KEPT_BYTES else 0, abs=NOISE)
    assert rank.observer.relieve() == pytest.approx(kept.anon - before.anon, abs=NOISE)
    rest = rank.observer.observe()
    assert (rest.anon, rest.execution_room) == pytest.approx((before.anon, nbytes), abs=NOISE)
    assert rank.observer.relieve() < NOISE
    assert list(holes) == []


def test_pages_that_come_and_go_are_no_execution_room(rank: Rank):
    pages = tuple(PageRef(0, page) for page in range(PAGES))
    for delta in (PageDelta(map=pages), PageDelta(unmap=pages), PageDelta(map=pages), PageDelta(unmap=pages)):
        assert rank.store.apply(delta, 0).mapped
        rank.observer.begin_step()
        for ref in delta.map:
            poke(rank.arena.address + ref.page * 2 * MIB, b"1" * 2 * MIB)
        seen = rank.observer.observe()
        assert seen.owned == PAGES * 2 * MIB
        assert seen.execution_room < NOISE


def test_pages_that_leave_in_a_step_of_the_engine_are_no_execution_room():
    flags = {"block_size": 4096, "enable_vmm_kvcache": True, "vmm_elastic": True, "enable_prefix_cache": False}
    with LLM(tiny_checkpoint("llama"), dtype="float32", max_cache_size=128 * MIB, **flags) as llm:
        for number in range(24):
            wanted = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
            llm.engine.submit(Request(request_id=str(number), prompt_ids=[number] * 8, sampling=wanted))
        peak = 0
        while llm.engine.has_work:
            peak = max(peak, llm.engine.step().snapshot.memory.mapped)
        deadline = time.monotonic() + 10
        while llm.memory()["mapped"] and time.monotonic() < deadline:
            llm.idle()
        assert peak > 4 * NOISE
        assert llm.memory()["execution_room"] < NOISE


def test_what_comes_between_steps_of_the_engine_is_no_execution_room():
    flags = {"enable_vmm_kvcache": True, "vmm_elastic": True}
    with LLM(tiny_checkpoint("llama"), dtype="float32", max_cache_size=16 * MIB, **flags) as llm:
        before = llm.memory()["execution_room"]
        spike()  # weights that are read again
        llm.engine.look()
        assert llm.memory()["execution_room"] < before + NOISE


def test_closing_twice_gives_the_descriptors_back_once(rank: Rank):
    before = len(list(Path("/proc/self/fd").iterdir()))
    observer = HostMemoryObserver(rank.driver, rank.store)
    observer.close()
    observer.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# --- a device with an allocator of its own


class Bench(NamedTuple):
    """A simulated device, its allocator, and who watches them."""

    device: SimulatedDriver
    allocator: SimulatedAllocator
    store: VirtualKvStore
    observer: DeviceMemoryObserver

    def step(self, *spikes: int) -> Observation:
        """One step that needs these bytes one after the other."""
        self.observer.begin_step()
        for nbytes in spikes:
            with simulated.spike(self.allocator, nbytes):
                pass
        return self.observer.observe()


def bench(*, statistics: bool) -> Bench:
    device = SimulatedDriver(open_driver("cpu", mode="4k", page_bytes=65536), total_bytes=TOTAL)
    pool = PagePool(device, page_bytes=65536)
    store = VirtualKvStore([Arena(device, pool, TOTAL)], pool, 65536, fence=lambda: None)
    allocator = SimulatedAllocator(device)
    return Bench(device, allocator, store, DeviceMemoryObserver(device, store, allocator if statistics else None))


def test_with_statistics_the_room_is_what_the_largest_step_would_have_to_take_from_the_device():
    made = bench(statistics=True)
    made.allocator.allocate(20 * MIB)  # weights
    assert made.step(3 * MIB, 10 * MIB, MIB).execution_room == 0  # the allocator caches what that step needed
    assert made.observer.relieve() == 0
    made.allocator.empty_cache()
    seen = made.step(MIB)
    assert (seen.execution_peak, seen.tensors, seen.reserved) == (10 * MIB, 20 * MIB, 22 * MIB)
    assert seen.execution_room == 8 * MIB
    made.allocator.free(20 * MIB)
    assert made.step().execution_room == 0


def test_relief_gives_back_what_no_step_needs_and_does_not_try_again_in_vain():
    made = bench(statistics=True)
    made.step(4 * MIB)
    made.allocator.allocate(30 * MIB)
    made.allocator.free(30 * MIB)
    assert made.observer.relieve() == 30 * MIB
    seen = made.step()
    assert (seen.free, seen.execution_room) == (TOTAL, 4 * MIB)
    assert made.observer.relieve() == 0
    assert made.allocator.num_emptied == 1


def test_what_the_allocator_cannot_give_back_is_not_asked_for_at_every_step():
    made = bench(statistics=True)
    made.allocator.allocate(30 * MIB)
    made.allocator.free(30 * MIB)
    made.allocator.empty_cache = lambda: setattr(made.allocator, "num_emptied", made.allocator.num_emptied + 1)
    assert [made.observer.relieve() for _ in range(3)] == [0, 0, 0]
    assert made.allocator.num_emptied == 1


def test_without_statistics_the_largest_fall_of_a_step_is_kept_free_for_good():
    made = bench(statistics=False)
    pages = tuple(PageRef(0, page) for page in range(32))
    assert made.store.apply(PageDelta(map=pages), 0).mapped
    assert made.step(5 * MIB).execution_room == 6 * MIB  # whole segments; the pages were ours
    made.allocator.empty_cache()
    assert made.observer.relieve() == 0
    made.observer.begin_step()
    assert made.store.apply(PageDelta(unmap=pages[:16]), 0).mapped
    made.store.trim()
    seen = made.observer.observe()
    assert (seen.execution_room, seen.free_before, seen.free) == (6 * MIB, TOTAL - 2 * MIB, TOTAL - MIB)


def test_a_query_that_fails_shows_what_was_seen_before():
    made = bench(statistics=True)
    faulty = FaultyDriver(made.device)
    observer = DeviceMemoryObserver(faulty, made.store, made.allocator)
    made.device.peer = 8 * MIB
    faulty.fail("info", faulty.counts()["info"] + 1, False)
    assert [observer.observe().free for _ in range(2)] == [TOTAL, TOTAL - 8 * MIB]
    for nth in range(1, MOST_FAILED_READINGS + 1):
        faulty.fail("info", faulty.counts()["info"] + nth, False)
    for _ in range(MOST_FAILED_READINGS - 1):
        observer.observe()
    with pytest.raises(VmmError):
        observer.observe()


@pytest.mark.parametrize("statistics", [True, False])
def test_a_refused_allocation_raises_the_room_to_a_quarter_of_the_device_at_most(statistics: bool):
    made = bench(statistics=statistics)
    made.observer.begin_step()
    made.allocator.allocate(2 * MIB)
    made.observer.exhausted(3 * MIB)
    made.allocator.free(2 * MIB)
    assert made.observer.observe().execution_peak == 5 * MIB
    made.observer.exhausted(100 * TOTAL)
    assert made.observer.observe().execution_peak == TOTAL // 4


def test_a_refused_allocation_of_the_host_raises_its_room(rank: Rank):
    rank.observer.begin_step()
    rank.observer.exhausted(10 * MIB)
    assert rank.observer.observe().execution_room == pytest.approx(10 * MIB, abs=NOISE)
    rank.observer.exhausted(1 << 60)
    assert rank.observer.observe().execution_room <= rank.driver.info().total // 4 + NOISE
