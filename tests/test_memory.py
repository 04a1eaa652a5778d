"""What a rank sees of its memory: the execution room is what steps needed besides the pool's pages, and stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from checkpoints import tiny_checkpoint
from driver_kinds import open_kind, poke

from xllm_cli import LLM
from xllm_cli.core import PageDelta, PageRef, Request, SamplingParams
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.driver import Driver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.worker.kv_store import VirtualKvStore
from xllm_cli.worker.memory import HostMemoryObserver

MIB = 1 << 20
SPIKE = 96 * MIB
NOISE = 8 * MIB  # the allocator keeps some, the kernel counts in batches
PAGES = 32  # of 2 MiB


def spike() -> None:
    """Anonymous memory that is touched and given back at once."""
    np.full(SPIKE, 1, dtype=np.uint8)


class Rank(NamedTuple):
    """A KV store of one arena, and who watches its memory."""

    driver: Driver
    arena: Arena
    store: VirtualKvStore
    observer: HostMemoryObserver


@pytest.fixture
def rank() -> Iterator[Rank]:
    spike()  # what loading needed
    driver = open_kind("host-4k", pages=PAGES)
    page_bytes = driver.info().page_bytes
    pool = PagePool(driver, page_bytes=page_bytes)
    arena = Arena(driver, pool, PAGES * page_bytes)
    store = VirtualKvStore([arena], pool, page_bytes, fence=lambda: None)
    made = Rank(driver, arena, store, HostMemoryObserver(driver, store))
    yield made
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


def test_closing_twice_gives_the_descriptors_back_once(rank: Rank):
    before = len(list(Path("/proc/self/fd").iterdir()))
    observer = HostMemoryObserver(rank.driver, rank.store)
    observer.close()
    observer.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
