"""The page pool: takes, gives back, trims, never owns a page twice, and shares a device with its neighbours."""

from __future__ import annotations

import fcntl
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from driver_kinds import open_kind, run_child

from xllm_cli.errors import MemoryShortage
from xllm_cli.vmm.driver import Driver, FaultyDriver, VmmError
from xllm_cli.vmm.pool import DeviceLock, PagePool

PAGE = 4096


@pytest.fixture
def driver() -> Iterator[FaultyDriver]:
    driver = open_kind("faulty")
    assert isinstance(driver, FaultyDriver)
    yield driver
    driver.close()


@pytest.fixture
def pool(driver: Driver) -> PagePool:
    return PagePool(driver, page_bytes=PAGE)


def state(pool: PagePool, driver: Driver) -> tuple[int, int, int]:
    """(owned, free, pages the kernel counts), after a check."""
    pool.check()
    return pool.owned, pool.free_handles, driver.memfd_bytes() // PAGE


# --- elastic -------------------------------------------------------------------------------------------------------


def test_an_elastic_pool_begins_empty_and_creates_on_demand(pool: PagePool, driver: Driver) -> None:
    assert state(pool, driver) == (0, 0, 0)
    handles = pool.take(5)
    assert handles is not None and len(set(handles)) == 5
    assert state(pool, driver) == (5, 0, 5)
    assert pool.take(0) == []


def test_free_handles_are_taken_first_and_only_the_rest_is_created(pool: PagePool, driver: Driver) -> None:
    first = pool.take(6)
    assert first is not None
    pool.give(first[2:])
    second = pool.take(7)
    assert second is not None and second[:4] == first[2:]
    assert driver.counts()["create_pages"] == 9
    assert state(pool, driver) == (9, 0, 9)


def test_handles_given_in_any_order_are_taken_adjacent(pool: PagePool) -> None:
    handles = pool.take(20)
    assert handles == sorted(handles or [])
    shuffled = random.Random(3).sample(handles, 20)
    for handle in shuffled:
        pool.give([handle])
    assert pool.take(20) == handles


def test_trim_destroys_what_is_free(pool: PagePool, driver: Driver) -> None:
    handles = pool.take(5)
    assert handles is not None
    assert pool.trim() == 0
    pool.give(handles[:3])
    assert pool.trim() == 3
    assert state(pool, driver) == (2, 0, 2)


def test_trim_keeps_what_the_driver_could_not_destroy(pool: PagePool, driver: FaultyDriver) -> None:
    handles = pool.take(5)
    assert handles is not None
    pool.give(handles)
    driver.fail("destroy", 2, False)
    assert pool.trim() == 4
    assert state(pool, driver) == (1, 1, 1)
    assert pool.trim() == 1 and state(pool, driver) == (0, 0, 0)


def test_keep_free_is_left_on_the_device(pool: PagePool, driver: Driver) -> None:
    assert pool.take(10, keep_free=55 * PAGE) is None
    assert (
        pool.last_shortage == f"free memory: {10 * PAGE} bytes wanted, {64 * PAGE} free, {55 * PAGE} of them to be kept"
    )
    assert state(pool, driver) == (0, 0, 0)
    handles = pool.take(10, keep_free=54 * PAGE)
    assert handles is not None
    pool.give(handles)
    assert pool.take(10, keep_free=1 << 60) == handles, "what is owned already costs nothing"


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_shortage_in_the_driver_is_none(pool: PagePool, driver: FaultyDriver, nth: int) -> None:
    spare = pool.take(2)
    assert spare is not None
    pool.give(spare)
    driver.reset_counts()
    driver.fail("create", nth, True)
    assert pool.take(5) is None
    assert pool.last_shortage.startswith("create: planned shortage")
    assert state(pool, driver) == (2, 2, 2)
    assert len(pool.take(5) or []) == 5


def test_a_failure_in_the_driver_is_raised_and_changes_nothing(pool: PagePool, driver: FaultyDriver) -> None:
    driver.fail("create", 3, False)
    with pytest.raises(VmmError, match="planned failure"):
        pool.take(4)
    assert state(pool, driver) == (0, 0, 0)


def test_giving_what_is_not_taken_is_caught(pool: PagePool) -> None:
    handles = pool.take(2)
    assert handles is not None
    pool.give(handles[:1])
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give(handles[:1])
    with pytest.raises(AssertionError, match="only what it owns"):
        pool.give([12345])


def test_check_finds_a_handle_the_driver_lost(pool: PagePool, driver: Driver) -> None:
    handles = pool.take(2)
    assert handles is not None
    driver.destroy(handles)
    with pytest.raises(AssertionError, match="unknown to the driver"):
        pool.check()


def test_random_takes_and_gives_keep_the_sum(driver: FaultyDriver) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    pool, taken = PagePool(driver, page_bytes=PAGE), []
    for _ in range(2000):
        if draw.random() < 0.2:
            driver.reset_counts()
            driver.fail(draw.choice(("create", "destroy")), draw.randint(1, 8), True)
        if draw.random() < 0.5:
            taken += pool.take(draw.randint(0, 12)) or []
        else:
            draw.shuffle(taken)
            pool.give([taken.pop() for _ in range(draw.randint(0, len(taken)))])
        if draw.random() < 0.2:
            pool.trim()
        assert state(pool, driver) == (pool.owned, pool.owned - len(taken), pool.owned)


# --- the device lock -----------------------------------------------------------------------------------------------


def test_creation_waits_for_the_device_lock(driver: Driver, tmp_path: Path) -> None:
    pool = PagePool(driver, page_bytes=PAGE, lock_path=tmp_path / "device.lock")
    neighbour = os.open(tmp_path / "device.lock", os.O_RDWR)
    fcntl.flock(neighbour, fcntl.LOCK_EX)
    threading.Timer(0.1, fcntl.flock, (neighbour, fcntl.LOCK_UN)).start()
    begin = time.monotonic()
    assert len(pool.take(3) or []) == 3
    assert time.monotonic() - begin > 0.09
    fcntl.flock(neighbour, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was given back
    os.close(neighbour)
    pool.close()


def test_a_neighbour_that_keeps_the_lock_is_a_shortage(driver: Driver, tmp_path: Path) -> None:
    pool = PagePool(driver, page_bytes=PAGE, lock_path=tmp_path / "device.lock")
    free = pool.take(2)
    assert free is not None
    pool.give(free)
    neighbour = os.open(tmp_path / "device.lock", os.O_RDWR)
    fcntl.flock(neighbour, fcntl.LOCK_EX)
    assert pool.take(3) is None and "held the device lock for 1 s" in pool.last_shortage
    assert pool.take(2) == free, "owned pages need no lock"
    os.close(neighbour)


def child_counts(folder: str) -> None:
    lock, counter = DeviceLock(Path(folder, "lock")), Path(folder, "counter")
    for _ in range(50):
        with lock.hold(deadline_seconds=20) as held:
            assert held
            number = int(counter.read_text())
            time.sleep(0.0005)  # another process that read the same number would lose an increment
            counter.write_text(str(number + 1))


def test_the_lock_keeps_processes_apart(tmp_path: Path) -> None:
    (tmp_path / "counter").write_text("0")
    with ThreadPoolExecutor(3) as threads:
        children = list(threads.map(lambda _: run_child("test_pool.child_counts", str(tmp_path)), range(3)))
    assert [child.stderr for child in children] == ["", "", ""]
    assert (tmp_path / "counter").read_text() == "150"


# --- fixed ---------------------------------------------------------------------------------------------------------


def test_a_fixed_pool_exists_from_the_start_and_never_changes() -> None:
    driver = open_kind("small", pages=300)
    seen: list[tuple[int, int]] = []
    pool = PagePool(driver, page_bytes=PAGE, fixed_pages=300, progress=lambda done, total: seen.append((done, total)))
    assert state(pool, driver) == (300, 300, 300)
    assert seen[-1] == (300, 300) and seen == sorted(seen) and len(seen) == 5
    handles = pool.take(300, keep_free=1 << 60)
    assert handles is not None and pool.take(1) is None
    assert pool.last_shortage == "fixed pool: 1 more pages wanted, all 300 in use"
    pool.give(handles)
    assert pool.trim() == 0 and state(pool, driver) == (300, 300, 300)
    pool.close()
    assert driver.memfd_bytes() == 0


def test_a_fixed_pool_that_does_not_fit_leaves_nothing_behind() -> None:
    driver = open_kind("small", pages=299)
    with pytest.raises(MemoryShortage, match=r"needs 300 pages of 4096 bytes.*--vmm_elastic=true"):
        PagePool(driver, page_bytes=PAGE, fixed_pages=300)
    assert driver.memfd_bytes() == 0 and driver.usage()["handles"] == 0


@pytest.mark.parametrize("nth", [1, 64, 65, 150])
def test_a_fixed_pool_on_a_failing_device_leaves_nothing_behind(nth: int) -> None:
    driver = FaultyDriver(open_kind("small", pages=200))
    driver.fail("create", nth, False)
    with pytest.raises(VmmError, match="planned failure"):
        PagePool(driver, page_bytes=PAGE, fixed_pages=150)
    assert driver.memfd_bytes() == 0


def test_a_lock_file_tidied_away_is_replaced_by_the_newcomers(tmp_path: Path) -> None:
    path = tmp_path / "device.lock"
    old = DeviceLock(path)
    path.unlink()
    with old.hold(0) as held:
        assert held, "alone with the old file"
    newcomer = DeviceLock(path)
    with newcomer.hold(0) as held, old.hold(0) as held_too:
        assert (held, held_too) == (True, False)
    for lock in (old, newcomer):
        with lock.hold(0) as held:
            assert held
        lock.close()
