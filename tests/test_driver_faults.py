"""What drivers do when the kernel fails them, and the faulty driver that fails on purpose."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from driver_kinds import count_vmas, is_accessible, open_kind, page_bytes_of, peek, poke, run_child
from failing_syscalls import MADV_COLLAPSE, MADV_POPULATE_WRITE, PUNCH_HOLE_KEEP_SIZE, fail_syscall

from xllm_cli.errors import DeviceError
from xllm_cli.vmm.driver import Driver, FaultyDriver, VmmError, VmmShortage, open_driver


def run_case(name: str, *args: str) -> None:
    child = run_child(f"test_driver_faults.{name}", *args)
    assert (child.returncode, child.stdout) == (0, "done\n"), child.stdout + child.stderr


def reserve_pages(driver: Driver, count: int) -> list[int]:
    start = driver.reserve(count * page_bytes_of(driver))
    return [start + i * page_bytes_of(driver) for i in range(count)]


# --- the kernel says no --------------------------------------------------------------------------------------------


def case_no_huge_pages(code: str) -> None:
    driver = open_kind("host-huge")
    fail_syscall("madvise", {2: MADV_COLLAPSE}, int(code))
    pages, handles = reserve_pages(driver, 20), driver.create(20)
    driver.map(list(zip(pages, handles, strict=True)))
    assert peek(pages[19], 4) == bytes(4)
    assert driver.memfd_bytes() == 20 * page_bytes_of(driver)
    assert driver.unmap(pages) == [] and driver.destroy(handles) == []
    assert driver.memfd_bytes() == 0
    print("done")


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EAGAIN, errno.EINVAL])
def test_small_pages_stand_in_for_missing_huge_ones(code: int) -> None:
    run_case("case_no_huge_pages", str(code))


def case_memory_limit() -> None:
    driver = open_kind("host-huge")
    kept = driver.create(2)
    fail_syscall("madvise", {2: MADV_COLLAPSE}, errno.EBUSY)
    for count in (1, 5, 40):
        with pytest.raises(VmmShortage) as caught:
            driver.create(count)
        assert (caught.value.op, caught.value.code) == ("create", errno.EBUSY)
        assert driver.memfd_bytes() == 2 * page_bytes_of(driver), "the seed pages are given back"
    assert driver.info().free == 62 * page_bytes_of(driver)
    assert driver.destroy(kept) == []
    print("done")


def test_a_memory_limit_is_a_shortage() -> None:
    run_case("case_memory_limit")


def case_old_kernel() -> None:
    fail_syscall("madvise", {2: MADV_COLLAPSE}, errno.EINVAL)
    assert open_driver("cpu").info().mode == "4k"
    with pytest.raises(DeviceError, match=r"host_page_mode=huge does not work here.*--host_page_mode=4k"):
        open_driver("cpu", mode="huge")
    print("done")


def test_old_kernels_get_small_pages_and_a_warning() -> None:
    child = run_child("test_driver_faults.case_old_kernel")
    assert (child.returncode, child.stdout) == (0, "done\n"), child.stderr
    assert "using 4k pages" in child.stderr and "kill" in child.stderr


def case_no_memory_files() -> None:
    fail_syscall("memfd_create", {}, errno.EPERM)
    for mode in ("auto", "4k", "huge"):
        with pytest.raises(DeviceError, match="make the memory file: Operation not permitted"):
            open_driver("cpu", mode=mode)
    print("done")


def test_a_sandbox_without_memory_files_has_no_device() -> None:
    run_case("case_no_memory_files")


def case_file_is_full() -> None:
    driver = open_kind("small")
    size = page_bytes_of(driver)
    driver.create(3)
    fail_syscall("fallocate", {1: 0, 2: 3 * size}, errno.ENOSPC)
    with pytest.raises(VmmShortage, match="No space left"):
        driver.create(5)
    assert driver.memfd_bytes() == 3 * size and driver.usage()["handles"] == 3
    print("done")


def test_a_full_file_is_a_shortage() -> None:
    run_case("case_file_is_full")


def case_map_fails_at_each_position(kind: str) -> None:
    driver = open_kind(kind)
    size = page_bytes_of(driver)
    pages, handles = reserve_pages(driver, 16), driver.create(9)
    fail_syscall("mmap", {5: 8 * size}, errno.ENOMEM)  # the page at offset 8: the last handle
    for position in range(8):
        order = [*handles[:position], handles[8], *handles[position:7]]
        with pytest.raises(VmmShortage) as caught:
            driver.map(list(zip(pages[::2], order, strict=True)))
        assert caught.value.address == pages[2 * position]
        assert (driver.usage()["mapped"], driver.usage()["vmas"]) == (0, 1)
        assert not any(is_accessible(page) for page in pages)
    driver.map(list(zip(pages[::2], handles[:8], strict=True)))
    assert driver.unmap(pages[:16:2]) == [] and driver.destroy(handles) == []
    print("done")


@pytest.mark.parametrize("kind", ["host-huge", "small"])
def test_a_failing_map_is_undone_at_each_position(kind: str) -> None:
    run_case("case_map_fails_at_each_position", kind)


def case_page_tables_fail() -> None:
    driver = open_kind("host-huge")
    size = page_bytes_of(driver)
    pages, handles = reserve_pages(driver, 8), driver.create(3)
    fail_syscall("madvise", {1: size, 2: MADV_POPULATE_WRITE}, errno.EFAULT)
    driver.map(list(zip(pages[:2], handles[:2], strict=True)))
    with pytest.raises(VmmError, match="Bad address") as caught:
        driver.map([(pages[4], handles[2])])
    assert type(caught.value) is VmmError and not is_accessible(pages[4])
    assert driver.usage()["mapped"] == 2
    print("done")


def test_a_failing_populate_is_an_error() -> None:
    run_case("case_page_tables_fail")


def case_unmap_fails(also_protect: str) -> None:
    driver = open_kind("small")
    pages, handles = reserve_pages(driver, 8), driver.create(3)
    driver.map(list(zip(pages[::2], handles, strict=False)))
    poke(pages[2], b"kept")
    fail_syscall("mmap", {0: pages[2]}, errno.ENOMEM)
    if also_protect:
        fail_syscall("mprotect", {0: pages[2]}, errno.ENOMEM)
    stuck = driver.unmap(pages[:6:2])
    assert stuck == ([pages[2]] if also_protect else [])
    assert [is_accessible(page) for page in pages[:6:2]] == [False, bool(also_protect), False]
    if also_protect:
        assert peek(pages[2], 4) == b"kept" and driver.usage()["mapped"] == 1
        assert driver.last_failure() == f"unmap at {pages[2]:#x}: Cannot allocate memory (code 12)"
        handles.remove(handles[1])
    assert driver.destroy(handles) == []
    print("done")


@pytest.mark.parametrize("also_protect", ["", "yes"])
def test_a_page_that_cannot_be_unmapped_is_returned(also_protect: str) -> None:
    run_case("case_unmap_fails", also_protect)


def case_destroy_fails() -> None:
    driver = open_kind("small")
    size = page_bytes_of(driver)
    (page, *_), handles = reserve_pages(driver, 4), driver.create(5)
    fail_syscall("fallocate", {1: PUNCH_HOLE_KEEP_SIZE, 2: 3 * size}, errno.EIO)
    assert driver.destroy([handles[0], handles[3]]) == [handles[3]]
    assert driver.last_failure() == "destroy: Input/output error (code 5)"
    assert driver.usage()["handles"] == 4 and driver.memfd_bytes() == 4 * size
    driver.map([(page, handles[3])])
    driver.unmap([page])
    assert driver.destroy(handles[1:]) == [], "together with its neighbours it goes"
    print("done")


def test_a_handle_that_cannot_be_destroyed_is_returned() -> None:
    run_case("case_destroy_fails")


def case_kernel_limit() -> None:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    driver = open_kind("small", pages=limit, vma_limit=10 * limit)
    size = page_bytes_of(driver)
    start = driver.reserve(2 * limit * size)
    before = count_vmas(start, 2 * limit * size)
    handles = driver.create(limit * 6 // 10)
    scattered = [(start + 2 * i * size, handle) for i, handle in enumerate(handles)]
    with pytest.raises(VmmShortage) as caught:
        driver.map(scattered)
    assert caught.value.code == errno.ENOMEM and driver.usage()["mapped"] == 0
    assert not is_accessible(start) and count_vmas(start, 2 * limit * size) <= before + 8
    driver.map(scattered[:1000])
    print("done")


@pytest.mark.skipif(
    int(Path("/proc/sys/vm/max_map_count").read_text()) > 200_000, reason="vm.max_map_count is too high to reach"
)
def test_the_kernels_own_limit_of_mappings_is_a_shortage() -> None:
    run_case("case_kernel_limit")


# --- the faulty driver ---------------------------------------------------------------------------------------------


@pytest.fixture
def faulty() -> FaultyDriver:
    driver = open_kind("faulty")
    assert isinstance(driver, FaultyDriver)
    return driver


@pytest.mark.parametrize("shortage", [False, True])
@pytest.mark.parametrize("nth", range(1, 8))
def test_create_fails_at_each_page(faulty: FaultyDriver, nth: int, shortage: bool) -> None:
    faulty.fail("create", nth, shortage)
    handles: list[int] = []
    failures = []
    for count in (3, 4, 2):
        try:
            handles += faulty.create(count)
        except VmmError as error:
            failures.append((count, type(error)))
    assert failures == [(3 if nth <= 3 else 4, VmmShortage if shortage else VmmError)]
    assert faulty.usage()["handles"] == len(handles) == 9 - failures[0][0]
    assert faulty.memfd_bytes() == len(handles) * page_bytes_of(faulty)


@pytest.mark.parametrize("nth", range(1, 6))
def test_map_fails_at_each_page_and_is_undone(faulty: FaultyDriver, nth: int) -> None:
    pages, handles = reserve_pages(faulty, 5), faulty.create(5)
    batch = list(zip(pages, handles, strict=True))
    faulty.fail("map", nth, True)
    with pytest.raises(VmmShortage) as caught:
        faulty.map(batch)
    assert caught.value.address == pages[nth - 1]
    assert faulty.usage()["mapped"] == 0 and not any(is_accessible(page) for page in pages)
    faulty.map(batch)
    assert faulty.counts()["map"] == 2 and faulty.counts()["map_pages"] == 10


@pytest.mark.parametrize("nth", range(1, 6))
def test_unmap_and_destroy_keep_the_failing_page(faulty: FaultyDriver, nth: int) -> None:
    pages, handles = reserve_pages(faulty, 5), faulty.create(5)
    faulty.map(list(zip(pages, handles, strict=True)))
    faulty.fail("unmap", nth, False)
    faulty.fail("destroy", nth, False)
    assert faulty.unmap(pages) == [pages[nth - 1]]
    assert [is_accessible(page) for page in pages] == [i == nth - 1 for i in range(5)]
    assert faulty.unmap([pages[nth - 1]]) == []
    assert faulty.destroy(handles) == [handles[nth - 1]]
    assert faulty.destroy([handles[nth - 1]]) == [] and faulty.memfd_bytes() == 0


def test_ranges_fail_and_counts_restart(faulty: FaultyDriver) -> None:
    size = page_bytes_of(faulty)
    address = faulty.reserve(size)
    faulty.reset_counts()
    faulty.fail("reserve", 2, True)
    faulty.fail("release", 1, False)
    other = faulty.reserve(size)
    with pytest.raises(VmmShortage, match="planned shortage"):
        faulty.reserve(size)
    with pytest.raises(VmmError, match="planned failure"):
        faulty.release(other, size)
    faulty.release(other, size)
    faulty.release(address, size)
    assert faulty.counts()["reserve"] == 2 and faulty.counts()["release"] == 3


def test_a_device_that_cannot_be_asked_is_an_error(faulty: FaultyDriver) -> None:
    faulty.reset_counts()
    faulty.fail("info", 2, False)
    assert faulty.info().page_bytes == 4096
    with pytest.raises(VmmError, match="info: planned failure"):
        faulty.info()
    assert faulty.info().name == "host" and faulty.counts()["info"] == 3


def test_an_unknown_verb_cannot_fail(faulty: FaultyDriver) -> None:
    with pytest.raises(ValueError, match="no driver verb is called 'alias'"):
        faulty.fail("alias", 1, True)


def test_errors_carry_what_happened() -> None:
    error = VmmShortage("map", errno.ENOMEM, 0x7F00, os.strerror(errno.ENOMEM))
    assert (error.op, error.code, error.address, error.text) == ("map", 12, 0x7F00, "Cannot allocate memory")
    assert str(error) == "map at 0x7f00: Cannot allocate memory (code 12)"
    assert isinstance(error, VmmError)
