"""The contract of native/vmm/driver.h, checked on every driver. One file, because the contract is one page.

`on_host` marks what the header says of the host alone: kernel mappings, the memory file, zeroed pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from driver_kinds import HOST_KINDS, KINDS, count_vmas, is_accessible, open_kind, page_bytes_of, peek, poke, run_child

from xllm_cli._vmm import probe_host
from xllm_cli.errors import DeviceError
from xllm_cli.vmm.driver import Driver, VmmError, VmmShortage, open_driver

RANGE_PAGES = 32

on_host = pytest.mark.parametrize("kind", HOST_KINDS, indirect=True)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "host-huge" and not probe_host().huge:
        pytest.skip(f"mode huge does not work here: {probe_host().reason}")
    return str(request.param)


@pytest.fixture
def driver(kind: str) -> Iterator[Driver]:
    driver = open_kind(kind)
    yield driver
    driver.close()


@pytest.fixture
def pages(driver: Driver) -> list[int]:
    """The page addresses of a fresh range of RANGE_PAGES pages."""
    size = page_bytes_of(driver)
    start = driver.reserve(RANGE_PAGES * size)
    return [start + i * size for i in range(RANGE_PAGES)]


def assert_misuse(call: Callable[[], object], op: str) -> None:
    with pytest.raises(VmmError) as caught:
        call()
    assert not isinstance(caught.value, VmmShortage)
    assert caught.value.op == op and caught.value.code in (16, 22) and caught.value.text


# --- pages and their bytes -----------------------------------------------------------------------------------------


def test_info_names_the_device(driver: Driver, kind: str) -> None:
    info = driver.info()
    names = {"host-huge": ("host", "huge"), "acl": ("acl", "hbm"), "simulated": ("simulated", "4k")}
    assert (info.name, info.mode) == names.get(kind, ("host", "4k"))
    assert info.can_alias and info.max_reserve_bytes >= 128 << 30
    assert info.total == info.free == 64 * info.page_bytes
    driver.create(3)
    assert driver.info().free == 61 * info.page_bytes


def test_bytes_stay_with_the_handle(driver: Driver, pages: list[int]) -> None:
    size = page_bytes_of(driver)
    (handle,) = driver.create(1)
    driver.map([(pages[3], handle)])
    poke(pages[3] + size - 9, b"last byte")
    poke(pages[3], b"first")
    assert driver.unmap([pages[3]]) == []
    driver.map([(pages[17], handle)])
    assert peek(pages[17], 5) == b"first"
    assert peek(pages[17] + size - 9, 9) == b"last byte"


def test_every_page_is_its_own(driver: Driver, pages: list[int]) -> None:
    handles = driver.create(RANGE_PAGES)
    driver.map(list(zip(pages, reversed(handles), strict=True)))
    for number, page in enumerate(pages):
        poke(page, number.to_bytes(4, "little"))
    driver.unmap(pages)
    driver.map(list(zip(pages, handles, strict=True)))
    assert [int.from_bytes(peek(page, 4), "little") for page in pages] == list(reversed(range(RANGE_PAGES)))


def test_one_handle_at_two_addresses(driver: Driver, pages: list[int]) -> None:
    (handle,) = driver.create(1)
    driver.map([(pages[0], handle), (pages[5], handle)])
    poke(pages[0], b"shared")
    assert peek(pages[5], 6) == b"shared"
    assert driver.unmap([pages[0]]) == []
    assert_misuse(lambda: driver.destroy([handle]), "destroy")
    assert peek(pages[5], 6) == b"shared"


@on_host
def test_fresh_pages_are_zero(driver: Driver, pages: list[int]) -> None:
    size = page_bytes_of(driver)
    for _ in range(2):
        handles = driver.create(2)
        driver.map(list(zip(pages, handles, strict=False)))
        assert peek(pages[0], 2 * size) == bytes(2 * size)
        ctypes.memset(pages[0], 0x5A, 2 * size)
        driver.unmap(pages[:2])
        assert driver.destroy(handles) == []


@on_host
def test_poison_fills_fresh_pages(kind: str) -> None:
    driver = open_kind(kind, poison=0xFF)
    size = page_bytes_of(driver)
    start = driver.reserve(3 * size)
    driver.map([(start + i * size, handle) for i, handle in enumerate(driver.create(3))])
    assert peek(start, 3 * size) == b"\xff" * (3 * size)
    driver.close()


@pytest.mark.parametrize("mode", ["auto", "4k"])
def test_pages_of_several_units(mode: str) -> None:
    size = 6 << 20
    driver = open_driver("cpu", mode=mode, page_bytes=size, total_bytes=10 * size)
    start = driver.reserve(4 * size)
    driver.map([(start + 2 * size, driver.create(1)[0])])
    poke(start + 3 * size - 3, b"end")
    assert driver.memfd_bytes() == size and driver.info().page_bytes == size
    driver.close()


# --- kernel mappings and memory ------------------------------------------------------------------------------------


@on_host
def test_adjacent_pages_share_one_mapping(driver: Driver, pages: list[int]) -> None:
    size = page_bytes_of(driver)
    empty = count_vmas(pages[0], RANGE_PAGES * size)
    handles = driver.create(4) + driver.create(4)
    driver.map(list(zip(pages[4:12], handles, strict=True)))
    assert count_vmas(pages[0], RANGE_PAGES * size) == empty + 2 == driver.usage()["vmas"]
    driver.unmap(pages[8:9])
    assert count_vmas(pages[0], RANGE_PAGES * size) == empty + 4 == driver.usage()["vmas"]
    driver.map([(pages[8], handles[4])])
    assert count_vmas(pages[0], RANGE_PAGES * size) == empty + 2 == driver.usage()["vmas"]


def places(driver: Driver, handles: list[int]) -> list[int]:
    """Where in the memory file, in pages."""
    found = []
    for handle in handles:
        fd, offset, nbytes = driver.export(handle)
        os.close(fd)
        found.append(offset // nbytes)
    return found


@on_host
def test_places_are_given_out_in_runs(driver: Driver) -> None:
    handles = driver.create(8)
    assert places(driver, handles) == list(range(8))
    for freed in (6, 5, 4, 1):
        driver.destroy([handles[freed]])
    assert places(driver, driver.create(3)) == [4, 5, 6]
    assert places(driver, driver.create(2)) == [8, 9], "a whole run rather than the first gaps"
    assert places(driver, driver.create(1)) == [1]


@on_host
def test_places_are_pieced_together_when_no_run_is_long_enough(kind: str) -> None:
    driver = open_kind(kind, pages=16)  # four times as many places
    for _ in range(8):
        driver.destroy(driver.create(8)[:7])
    assert places(driver, driver.create(8)) == [0, 1, 2, 3, 4, 5, 6, 8]
    assert driver.memfd_bytes() == 16 * page_bytes_of(driver)
    driver.close()


def test_huge_pages_are_mapped_whole() -> None:
    driver = open_kind("host-huge")
    size = page_bytes_of(driver)
    start = driver.reserve(4 * size)
    driver.map([(start + i * size, handle) for i, handle in enumerate(driver.create(4))])
    smaps = Path("/proc/self/smaps").read_text().split(f"{start:x}-", maxsplit=1)[1]
    (whole,) = re.findall(r"ShmemPmdMapped: +(\d+) kB", smaps)[:1]
    assert int(whole) > 0, "none of four pages is one entry of the page table"
    driver.close()


def test_no_mapping_and_no_memory_is_left_behind(driver: Driver, pages: list[int]) -> None:
    before, free = count_vmas(0, 1 << 47), driver.info().free
    for step in (1, 2, 3) * 4:
        handles = driver.create(10)
        used = pages[: 10 * step : step]
        driver.map(list(zip(used, handles, strict=True)))
        assert driver.memfd_bytes() == 10 * page_bytes_of(driver)
        assert driver.unmap(used) == [] and driver.destroy(handles) == []
        assert driver.memfd_bytes() == 0 and driver.info().free == free
    assert count_vmas(0, 1 << 47) <= before + 3  # the interpreter's own allocator may grow


def vmas_in_use() -> int:
    """Of all drivers in this process: other tests may have left some open."""
    driver = open_kind("small")
    return driver.usage()["process_vmas"]


@on_host
def test_too_many_mappings_are_a_shortage(kind: str) -> None:
    driver = open_kind(kind, vma_limit=vmas_in_use() + 9)
    size = page_bytes_of(driver)
    start = driver.reserve(RANGE_PAGES * size)
    scattered = [(start + 2 * i * size, handle) for i, handle in enumerate(driver.create(5))]
    with pytest.raises(VmmShortage, match=f"{vmas_in_use() + 10} needed, {vmas_in_use() + 8} allowed"):
        driver.map(scattered)
    assert driver.usage()["mapped"] == 0 and driver.usage()["vmas"] == 1
    driver.map(scattered[:4])
    assert driver.unmap([address for address, _ in scattered[:4]]) == []
    driver.close()


@on_host
def test_unmap_is_never_refused_for_mappings(kind: str) -> None:
    driver = open_kind(kind, vma_limit=vmas_in_use() + 3)
    size = page_bytes_of(driver)
    start = driver.reserve(8 * size)
    driver.map([(start + i * size, handle) for i, handle in enumerate(driver.create(8))])
    assert driver.unmap([start + i * size for i in (1, 3, 5)]) == []
    assert driver.usage()["vmas"] == 9
    with pytest.raises(VmmShortage):
        driver.reserve(size)
    assert driver.usage()["ranges"] == 1
    driver.close()


def test_running_out_is_a_shortage_and_passes(driver: Driver, pages: list[int]) -> None:
    handles = driver.create(60)
    with pytest.raises(VmmShortage, match=r"total_bytes|simulated device"):
        driver.create(5)
    assert driver.memfd_bytes() == 60 * page_bytes_of(driver)
    handles += driver.create(4)
    assert driver.info().free == 0
    assert driver.destroy(handles[:10]) == []
    driver.map([(pages[0], driver.create(10)[9])])
    poke(pages[0], b"good")
    assert peek(pages[0], 4) == b"good"


def test_more_than_the_machine_has_is_a_shortage(kind: str) -> None:
    neighbour, driver = open_kind(kind), open_kind(kind, pages=1 << 40)
    neighbour.create(3)
    with pytest.raises(VmmShortage, match=r"host memory|aclrtMallocPhysical|simulated device"):
        driver.create(driver.info().free // page_bytes_of(driver) + 1)
    assert driver.memfd_bytes() == 0 and driver.usage()["handles"] == 0
    neighbour.close()
    driver.close()


@pytest.mark.parametrize("count", [1 << 30, 1 << 45, 1 << 63])
def test_absurd_counts_are_a_shortage(driver: Driver, count: int) -> None:
    with pytest.raises(VmmShortage):
        driver.create(count)


# --- misuse --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_bytes", [0, 100, 4096 + 512, (2 << 20) + 1])
def test_page_sizes_that_cannot_be(page_bytes: int) -> None:
    with pytest.raises(ValueError, match="positive multiple of 4096"):
        open_driver("cpu", page_bytes=page_bytes, mode="4k")
    with pytest.raises(ValueError, match="positive multiple of 2097152"):
        open_driver("cpu", page_bytes=page_bytes or 4096, mode="huge")


@pytest.mark.parametrize(("device", "mode"), [("cuda", "auto"), ("tpu", "auto"), ("cpu", "gigantic")])
def test_devices_and_modes_that_are_not_there(device: str, mode: str) -> None:
    with pytest.raises(DeviceError, match=r"--device=cpu|is not one of auto, huge, 4k"):
        open_driver(device, mode=mode)


def test_misuse_of_map(driver: Driver, pages: list[int]) -> None:
    handle, other = driver.create(2)
    driver.map([(pages[0], handle)])
    assert_misuse(lambda: driver.map([(pages[0], other)]), "map")
    assert_misuse(lambda: driver.map([(pages[1] + 1, other)]), "map")
    assert_misuse(lambda: driver.map([(pages[-1] + page_bytes_of(driver), other)]), "map")
    assert_misuse(lambda: driver.map([(pages[1], other), (pages[1], handle)]), "map")
    assert_misuse(lambda: driver.map([(pages[1], 12345)]), "map")
    assert driver.usage()["mapped"] == 1


def test_a_bad_page_at_any_place_undoes_the_batch(driver: Driver, pages: list[int]) -> None:
    handles, empty = driver.create(5), driver.usage()["vmas"]
    for position in range(5):
        batch = list(zip(pages, handles, strict=False))
        batch[position] = (pages[position], 999)
        assert_misuse(lambda batch=batch: driver.map(batch), "map")  # type: ignore[misc]
        assert (driver.usage()["mapped"], driver.usage()["vmas"]) == (0, empty)
    driver.map(list(zip(pages, handles, strict=False)))


def test_misuse_of_unmap_and_destroy(driver: Driver, pages: list[int]) -> None:
    handle, other = driver.create(2)
    driver.map([(pages[0], handle)])
    assert_misuse(lambda: driver.unmap([pages[0], pages[1]]), "unmap")
    assert_misuse(lambda: driver.unmap([pages[0], pages[0]]), "unmap")
    assert_misuse(lambda: driver.destroy([other, handle]), "destroy")
    assert_misuse(lambda: driver.destroy([other, other]), "destroy")
    assert driver.usage()["mapped"] == 1 and driver.destroy([other]) == []
    assert_misuse(lambda: driver.destroy([other]), "destroy")


def test_misuse_of_ranges(driver: Driver, pages: list[int]) -> None:
    nbytes = RANGE_PAGES * page_bytes_of(driver)
    driver.map([(pages[1], driver.create(1)[0])])
    assert_misuse(lambda: driver.reserve(nbytes + 1), "reserve")
    assert_misuse(lambda: driver.reserve(0), "reserve")
    assert_misuse(lambda: driver.release(pages[0], nbytes), "release")
    driver.unmap([pages[1]])
    assert_misuse(lambda: driver.release(pages[1], nbytes), "release")
    driver.release(pages[0], nbytes)
    assert_misuse(lambda: driver.release(pages[0], nbytes), "release")


def test_an_old_handle_is_not_its_successor(driver: Driver, pages: list[int]) -> None:
    (old,) = driver.create(1)
    driver.destroy([old])
    (new,) = driver.create(1)
    assert new != old
    assert_misuse(lambda: driver.map([(pages[0], old)]), "map")


def test_a_closed_driver_refuses_and_has_no_memory(driver: Driver, pages: list[int]) -> None:
    driver.map([(pages[0], driver.create(1)[0])])
    driver.close()
    driver.close()
    assert driver.memfd_bytes() == 0 and driver.usage()["handles"] == 0
    for call in (lambda: driver.create(1), lambda: driver.reserve(page_bytes_of(driver)), lambda: driver.destroy([1])):
        with pytest.raises(VmmError, match="closed"):
            call()


# --- processes and threads -----------------------------------------------------------------------------------------


def child_touches(kind: str) -> None:
    driver = open_kind(kind)
    size = page_bytes_of(driver)
    start = driver.reserve(2 * size)
    driver.map([(start, driver.create(1)[0])])
    places = {
        "mapped": lambda: start + size - 1,
        "never mapped": lambda: start + size,
        "unmapped": lambda: start + len(driver.unmap([start])),
        "closed": lambda: start + bool(driver.close()),
    }
    for name, place in places.items():
        address = place()
        assert is_accessible(address) == (name == "mapped")
        if (child := os.fork()) == 0:
            poke(address, b"x")
            os._exit(0)
        print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def test_touching_what_is_not_mapped_faults(kind: str) -> None:
    child = run_child("test_drivers.child_touches", kind)
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == ["mapped 0", "never mapped -11", "unmapped -11", "closed -11"]


def child_lists_files() -> None:
    print(
        [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ]
    )


@on_host
def test_children_do_not_inherit_the_memory_file(driver: Driver) -> None:
    driver.create(1)
    own = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert any("xllm-pages" in path for path in own)
    child = run_child("test_drivers.child_lists_files", close_fds=False)
    assert child.returncode == 0 and "xllm-pages" not in child.stdout


def child_reads_export(fd: str, offset: str, nbytes: str) -> None:
    with mmap.mmap(int(fd), int(nbytes), offset=int(offset)) as memory:
        print(memory[:8].decode(), memory[-4:].hex())
        memory[-4:] = b"back"


@on_host
def test_another_process_sees_an_exported_page(driver: Driver, pages: list[int]) -> None:
    handle = driver.create(2)[1]
    driver.map([(pages[2], handle)])
    poke(pages[2], b"exported")
    fd, offset, nbytes = driver.export(handle)
    assert not os.get_inheritable(fd) and nbytes == page_bytes_of(driver)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    child = run_child("test_drivers.child_reads_export", str(fd), str(offset), str(nbytes), pass_fds=[fd])
    os.close(fd)
    assert child.stdout == "exported 00000000\n", child.stderr
    assert peek(pages[2] + nbytes - 4, 4) == b"back"


def test_every_verb_releases_the_interpreter(driver: Driver) -> None:
    verbs: dict[str, Callable[[], object]] = {  # refused ones will do, and can be repeated
        "reserve": lambda: driver.reserve(1),
        "release": lambda: driver.release(0, 1),
        "create": lambda: driver.create(1 << 60),
        "destroy": lambda: driver.destroy([0]),
        "map": lambda: driver.map([(0, 0)]),
        "unmap": lambda: driver.unmap([0]),
        "export": lambda: driver.export(0),
        "info": driver.info,
        "memfd_bytes": driver.memfd_bytes,
    }
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # from here on another thread runs only when this one lets it
    try:
        for name, verb in verbs.items():
            assert_lets_others_run(name, verb)
    finally:
        sys.setswitchinterval(before)


def assert_lets_others_run(name: str, verb: Callable[[], object]) -> None:
    gate, ran = threading.Lock(), []
    with gate:
        thread = threading.Thread(target=lambda: (gate.acquire(), ran.append(True)), daemon=True)
        thread.start()
    deadline = time.monotonic() + 10
    while not ran and time.monotonic() < deadline:
        with suppress(VmmError):
            verb()
    assert ran, f"{name} kept the interpreter to itself"
    thread.join(10)


def test_pages_are_created_on_many_threads(driver: Driver) -> None:
    with ThreadPoolExecutor(4) as threads:
        batches = list(threads.map(driver.create, [7] * 9))
        readings = list(threads.map(lambda _: (driver.info().free, driver.memfd_bytes()), range(8)))
    handles = [handle for batch in batches for handle in batch]
    assert len(set(handles)) == 63
    assert set(readings) == {(page_bytes_of(driver), 63 * page_bytes_of(driver))}
    assert driver.destroy(handles) == [] and driver.memfd_bytes() == 0


# --- random operations against a mirror ----------------------------------------------------------------------------


class Mirror:
    """A driver and what it should look like: the stamp of every handle, the handle at every page."""

    def __init__(self, driver: Driver, pages: list[int], seed: int) -> None:
        self.driver, self.pages, self.random = driver, pages, random.Random(seed)
        self.is_host = driver.info().name == "host"
        self.stamps: dict[int, bytes] = {}  # empty: fresh, may hold anything
        self.mapped: dict[int, int] = {}
        self.steps = 0

    def step(self) -> None:
        self.random.choice((self.create, self.destroy, self.map, self.map, self.unmap, self.write))()
        self.check()
        self.steps += 1

    def create(self) -> None:
        count = self.random.randint(1, 9)
        if len(self.stamps) + count > 64:
            with pytest.raises(VmmShortage):
                self.driver.create(count)
            return
        fresh = bytes(4) if self.is_host else b""
        self.stamps.update({handle: fresh for handle in self.driver.create(count)})

    def destroy(self) -> None:
        idle = sorted(set(self.stamps) - set(self.mapped.values()))
        chosen = self.random.sample(idle, self.random.randint(0, len(idle)))
        assert self.driver.destroy(chosen) == []
        for handle in chosen:
            del self.stamps[handle]

    def map(self) -> None:
        room = [page for page in self.pages if page not in self.mapped]
        count = self.random.randint(0, min(len(room), len(self.stamps), 6))
        chosen = dict(zip(self.random.sample(room, count), self.random.sample(sorted(self.stamps), count), strict=True))
        self.driver.map(list(chosen.items()))
        self.mapped.update(chosen)

    def unmap(self) -> None:
        chosen = self.random.sample(sorted(self.mapped), self.random.randint(0, len(self.mapped)))
        assert self.driver.unmap(chosen) == []
        for page in chosen:
            del self.mapped[page]

    def write(self) -> None:
        for page in self.random.sample(sorted(self.mapped), min(3, len(self.mapped))):
            self.stamps[self.mapped[page]] = self.random.randbytes(4)
            poke(page, self.stamps[self.mapped[page]])

    def check(self) -> None:
        for page, handle in self.mapped.items():
            assert peek(page, len(self.stamps[handle])) == self.stamps[handle]
        usage, size = self.driver.usage(), page_bytes_of(self.driver)
        assert (usage["handles"], usage["mapped"]) == (len(self.stamps), len(self.mapped))
        assert self.driver.memfd_bytes() == len(self.stamps) * size
        if self.is_host and self.steps % 20 == 0:
            assert count_vmas(self.pages[0], RANGE_PAGES * size) <= usage["vmas"] + 2  # the range may touch neighbours


def test_random_operations_agree_with_a_mirror(driver: Driver, kind: str, pages: list[int]) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    mirror = Mirror(driver, pages, seed)
    for _ in range(2000 if kind != "host-4k" else 300):  # 4 KiB pages by the thousand: slow, and the same code as small
        mirror.step()
