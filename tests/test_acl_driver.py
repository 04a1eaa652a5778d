"""The acl driver on the emulated Ascend runtime: the exact vendor calls, limits, threads, and what it never does.

The contract that all drivers share is in test_drivers.py, opening in test_acl_opening.py, failing devices in
test_acl_faults.py, broken drivers in test_acl_mutants.py.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from acl_emulation import PAGE, clean_emulator
from ascendcl import Emulator
from driver_kinds import acl_library, open_kind, peek, poke, run_child

from xllm_cli._vmm import probe_acl
from xllm_cli.core import PageDelta, PageRef
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.driver import Driver, VmmError, VmmShortage, open_driver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.worker.kv_store import VirtualKvStore

LARGEST = 128 << 30
PAGES = tuple(PageRef(tensor, page) for tensor in (0, 1) for page in range(4))


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with clean_emulator() as emulator:
        yield emulator


@pytest.fixture
def driver(emulator: Emulator) -> Iterator[Driver]:
    driver = open_kind("acl")
    yield driver
    driver.close()


class Store:
    """Two arenas of four pages in a store; every vendor call is listed."""

    def __init__(self, driver: Driver, emulator: Emulator, fence: Callable[[], None] = lambda: None) -> None:
        self.pool = PagePool(driver, page_bytes=PAGE)
        self.arenas = [Arena(driver, self.pool, 4 * PAGE) for _ in range(2)]
        self.store = VirtualKvStore(self.arenas, self.pool, PAGE, fence=fence)
        self.emulator = emulator

    def calls(self, **pages: tuple[PageRef, ...]) -> list[str]:
        """The vendor's functions that one delta calls."""
        with self.emulator.tracing() as calls:
            assert self.store.apply(PageDelta(**{"map": (), "unmap": (), **pages}), 0).mapped
        return [call["call"] for call in calls]


# --- the vendor's calls --------------------------------------------------------------------------------------------


def test_a_growth_step_with_handles_is_one_map_a_page_and_nothing_else(driver: Driver, emulator: Emulator) -> None:
    store = Store(driver, emulator)
    store.pool.give(store.pool.take(8) or [])
    assert store.calls(map=PAGES) == ["aclrtMapMem"] * 8
    assert store.calls(unmap=PAGES[:5]) == ["aclrtUnmapMem"] * 5
    assert store.calls(map=PAGES[:2], unmap=PAGES[5:]) == ["aclrtUnmapMem"] * 3 + ["aclrtMapMem"] * 2
    assert store.calls() == []
    assert store.store.close()


def test_a_growth_step_that_creates_asks_once_and_creates_page_by_page(driver: Driver, emulator: Emulator) -> None:
    store = Store(driver, emulator)
    asked = ["aclrtGetDevice", "aclrtGetMemInfo", "aclrtGetDevice"]
    assert store.calls(map=PAGES[:3]) == asked + ["aclrtMallocPhysical"] * 3 + ["aclrtMapMem"] * 3
    assert store.calls(unmap=PAGES[:3]) == ["aclrtUnmapMem"] * 3
    with emulator.tracing() as calls:
        store.store.trim()
    assert [call["call"] for call in calls] == ["aclrtFreePhysical"] * 3
    assert store.store.close()


def test_calls_have_the_arguments_the_vendor_documents(driver: Driver, emulator: Emulator) -> None:
    with emulator.tracing() as calls:
        start = driver.reserve(3 * PAGE)
        (handle,) = driver.create(1)
        driver.map([(start + PAGE, handle)])
        driver.unmap([start + PAGE])
        driver.destroy([handle])
        driver.release(start, 3 * PAGE)
    made: dict[str, Any] = {call["call"]: call["arguments"] for call in calls}
    *_, vendor = made["aclrtMallocPhysical"]
    assert made["aclrtReserveMemAddress"] == [3 * PAGE, 0, 0, 1, start]  # the last is what it returned
    assert (made["aclrtMallocPhysical"][0], made["aclrtMallocPhysical"][2]) == (PAGE, 0)
    assert made["aclrtMapMem"] == [start + PAGE, PAGE, 0, vendor, 0]
    assert made["aclrtUnmapMem"] == [start + PAGE]
    assert made["aclrtFreePhysical"] == [vendor] and made["aclrtReleaseMemAddress"] == [start]


def test_every_function_is_used_and_nothing_is_ended(driver: Driver, emulator: Emulator) -> None:
    store = Store(driver, emulator)
    store.calls(map=PAGES)
    store.calls(unmap=PAGES)
    assert store.store.close()
    driver.close()
    counters = emulator.counters()
    for verb in ("ReserveMemAddress", "ReleaseMemAddress", "MallocPhysical", "FreePhysical", "MapMem", "UnmapMem"):
        assert counters[f"aclrt{verb}"].calls > 0 and counters[f"aclrt{verb}"].failed == 0
    assert not {name for name in counters if "Finalize" in name or "Reset" in name}


def test_what_a_driver_can_refuse_itself_never_reaches_the_vendor(driver: Driver, emulator: Emulator) -> None:
    start = driver.reserve(4 * PAGE)
    (handle,) = driver.create(1)
    driver.map([(start, handle)])
    before = emulator.counters()
    for misuse in (
        lambda: driver.reserve(LARGEST + PAGE),
        lambda: driver.map([(start, handle)]),
        lambda: driver.map([(start + 4 * PAGE, handle)]),
        lambda: driver.unmap([start + PAGE]),
        lambda: driver.destroy([handle]),
        lambda: driver.release(start, 4 * PAGE),
    ):
        with pytest.raises(VmmError):
            misuse()
    assert emulator.counters() == before


# --- limits --------------------------------------------------------------------------------------------------------


def test_a_range_has_a_largest_size_and_the_error_says_it(driver: Driver) -> None:
    assert driver.info().max_reserve_bytes == LARGEST
    start = driver.reserve(LARGEST)
    with pytest.raises(VmmError, match=f"reserves at most {LARGEST}, and two ranges are not adjacent"):
        driver.reserve(LARGEST + PAGE)
    driver.map([(start + LARGEST - PAGE, driver.create(1)[0])])
    poke(start + LARGEST - 4, b"last")
    assert peek(start + LARGEST - 4, 4) == b"last"
    driver.unmap([start + LARGEST - PAGE])
    driver.release(start, LARGEST)


def test_all_addresses_in_use_is_a_shortage(driver: Driver) -> None:
    ranges = []
    with pytest.raises(VmmShortage, match="aclrtReserveMemAddress"):
        while len(ranges) < 100:
            ranges.append(driver.reserve(LARGEST))
    assert 35 <= len(ranges) <= 42  # 5.25 TiB
    for start in ranges:
        driver.release(start, LARGEST)
    driver.release(driver.reserve(LARGEST), LARGEST)


def test_pages_have_no_descriptor_to_export(driver: Driver) -> None:
    (handle,) = driver.create(1)
    with pytest.raises(VmmError, match="not supported") as caught:
        driver.export(handle)
    assert (caught.value.op, caught.value.code) == ("create", 207000)


def test_drivers_of_one_process_share_the_device(driver: Driver) -> None:
    other = open_driver("npu", library=acl_library())
    free = other.info().free
    driver.create(5)
    assert other.info().free == free - 5 * PAGE
    other.close()
    assert driver.info().free == 59 * PAGE


# --- threads and the interpreter's lock ----------------------------------------------------------------------------


def test_any_thread_may_ask_and_create(driver: Driver, emulator: Emulator) -> None:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend((driver.info().free, *driver.create(2))))
    thread.start()
    thread.join(10)
    assert seen[0] == 64 * PAGE and driver.destroy(seen[1:]) == []


def test_a_thread_keeps_the_device_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(acl_library().parents[1]))
    monkeypatch.setenv("XLLM_ACL_EMULATOR_DEVICES", "2")
    child = run_child("acl_emulation.child_has_two_devices")
    assert json.loads(child.stdout) == [0, 0, 3 * PAGE], child.stderr


def test_no_vendor_call_is_made_with_the_interpreters_lock(emulator: Emulator) -> None:
    probe_acl(str(acl_library()))
    driver = open_kind("acl")
    store = Store(driver, emulator)
    store.calls(map=PAGES)
    store.calls(unmap=PAGES[:4])
    del driver, store  # nobody closed them: the last reference does
    counters = emulator.counters()
    assert len(counters) >= 9 and counters["aclrtUnmapMem"].calls == 8
    assert {name: count.with_gil for name, count in counters.items() if count.with_gil} == {}


def test_the_emulator_sees_who_holds_the_interpreters_lock(emulator: Emulator) -> None:
    count = ctypes.c_uint32()
    ctypes.PyDLL(str(emulator.path)).aclrtGetDeviceCount(ctypes.byref(count))  # PyDLL keeps the lock
    assert emulator.counters()["aclrtGetDeviceCount"].with_gil == 1


def test_others_run_while_the_vendor_works(driver: Driver, emulator: Emulator) -> None:
    start = driver.reserve(4 * PAGE)
    batch = [(start + i * PAGE, handle) for i, handle in enumerate(driver.create(4))]
    emulator.delay("aclrtMapMem", 0.05)
    ticks, done = [], threading.Event()

    def tick() -> None:
        while not done.wait(0.005):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.monotonic()
    driver.map(batch)
    end = time.monotonic()
    done.set()
    thread.join(10)
    assert end - begin >= 0.2 and sum(begin < at < end for at in ticks) >= 3


# --- device work ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fenced", [True, False])
def test_pages_leave_only_after_the_work_on_them(fenced: bool) -> None:
    with clean_emulator() as emulator:
        emulator.script("streams lazy")
        driver = open_kind("acl")
        wait = emulator.library.aclrtSynchronizeDevice if fenced else lambda: None
        store = Store(driver, emulator, fence=wait)
        store.calls(map=PAGES[:2])
        assert emulator.launch([(store.arenas[0].address, 2 * PAGE)]) == 0
        store.calls(unmap=PAGES[:1])
        broken = [violation["rule"] for violation in emulator.violations()]
        assert broken == ([] if fenced else ["no queued work on a page that is unmapped"])
        emulator.script("streams immediate")
        emulator.library.aclrtSynchronizeDevice()
        assert store.store.close()
        emulator.reset()
