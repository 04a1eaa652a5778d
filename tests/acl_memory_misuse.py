"""Ways to break ACL's contract with memory: ranges, handles, maps, blocks and copies."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import NamedTuple

from acl_calls import GIB, PAGE, Access, Acl, Location, Properties

COUNT = 4  # pages of the range that most misuses play with


class Misuse(NamedTuple):
    code: int  # hardware mode; 0: the call succeeds and harm comes later
    rule: str  # of the report, and of strict mode's last words
    commit: Callable[[Acl], object]


def page(acl: Acl) -> tuple[int, int]:
    """A range of COUNT pages and a handle."""
    return acl.reserve(COUNT * PAGE), acl.create()


def mapped(acl: Acl) -> tuple[int, int]:
    """A range with the handle in its first page."""
    address, handle = page(acl)
    acl.map(address, handle)
    return address, handle


def create(acl: Acl, nbytes: int = PAGE, flags: int = 0, **fields: object) -> None:
    properties = Properties.hbm()
    for name, value in fields.items():
        setattr(properties, name, value)
    acl.answer("aclrtMallocPhysical", nbytes, ctypes.byref(properties), flags)


def map_at(acl: Acl, *, place: int = 0, nbytes: int = PAGE, offset: int = 0, flags: int = 0) -> None:
    address, handle = page(acl)
    acl.call("aclrtMapMem", address + place, nbytes, offset, handle, flags)


def map_twice(acl: Acl) -> None:
    address, handle = mapped(acl)
    acl.map(address, handle)


def map_over(acl: Acl) -> None:
    """A handle of two pages whose second page would cover a mapped one."""
    address, handle = page(acl)
    acl.map(address + PAGE, handle)
    acl.map(address, acl.create(2 * PAGE), 2 * PAGE)


def map_other_device(acl: Acl) -> None:
    """The pin of the first map outlives the map."""
    address, handle = mapped(acl)
    acl.unmap(address)
    acl.destroy(handle)
    acl.map(address, acl.create(properties=Properties.hbm(1)))


def map_stale(acl: Acl) -> None:
    address, handle = page(acl)
    acl.destroy(handle)
    acl.map(address, handle)


def map_disowned(acl: Acl) -> None:
    address, handle = mapped(acl)
    acl.destroy(handle)
    acl.map(address + PAGE, handle)


def unmap_inside(acl: Acl) -> None:
    address = acl.reserve(COUNT * PAGE)
    acl.map(address, acl.create(2 * PAGE), 2 * PAGE)
    acl.unmap(address + PAGE)


def unmap_under_work(acl: Acl) -> None:
    address, _ = mapped(acl)
    acl.emulator.script("streams lazy")
    acl.emulator.launch([(address, 64)])
    acl.unmap(address)


def while_copied(acl: Acl, address: int, give_back: Callable[[int], None]) -> None:
    """Give memory back while another thread fills its page, slowly."""
    acl.emulator.delay("copy", 0.5)

    def copy() -> None:
        acl.start()
        acl.fill(address, 1, PAGE)

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        while ctypes.string_at(address, 1) != b"\x01":
            assert thread.is_alive()
        give_back(address)
    finally:
        thread.join()


def destroy_twice(acl: Acl) -> None:
    handle = acl.create()
    acl.destroy(handle)
    acl.destroy(handle)


def destroy_twice_mapped(acl: Acl) -> None:
    _, handle = mapped(acl)
    acl.destroy(handle)
    acl.destroy(handle)


def release_inside(acl: Acl) -> None:
    acl.release(acl.reserve(COUNT * PAGE) + PAGE)


def release_mapped(acl: Acl) -> None:
    acl.release(mapped(acl)[0])


def half_mapped(acl: Acl) -> int:
    """The last byte of a mapped page and the first of an unmapped one."""
    return mapped(acl)[0] + PAGE - 1


def copy_async_half_mapped(acl: Acl) -> None:
    acl.copy_async(half_mapped(acl), acl.malloc_host(2), 2)


def work_on_unmapped(acl: Acl) -> None:
    acl.emulator.launch([(acl.reserve(PAGE), 64)])
    acl.synchronize()


def free_inside(acl: Acl) -> None:
    acl.free(acl.malloc(PAGE) + 512)


def free_under_work(acl: Acl) -> None:
    address = acl.malloc(PAGE)
    acl.emulator.script("streams lazy")
    acl.emulator.launch([(address, 64)])
    acl.free(address)


def free_host_twice(acl: Acl) -> None:
    address = acl.malloc_host(64)
    acl.free_host(address)
    acl.free_host(address)


def set_access(acl: Acl, *, flags: int = 3, nbytes: int = PAGE) -> None:
    address, _ = mapped(acl)
    acl.call("aclrtMemSetAccess", address, nbytes, ctypes.byref(Access(flags, Location(0, 0))), 1)


def granularity(acl: Acl, option: int) -> None:
    properties, size = Properties.hbm(), ctypes.c_size_t()
    acl.call("aclrtMemGetAllocationGranularity", ctypes.byref(properties), option, ctypes.byref(size))


def retain_inside(acl: Acl) -> None:
    out = ctypes.c_uint64()
    acl.call("aclrtMemRetainAllocationHandle", mapped(acl)[0] + 512, ctypes.byref(out))


def attributes_of(acl: Acl, address: int) -> None:
    acl.call("aclrtPointerGetAttributes", address, ctypes.create_string_buffer(28))


MISUSES = {
    "reserve nothing": Misuse(100000, "sizes are positive", lambda acl: acl.reserve(0)),
    "reserve aligned": Misuse(
        107000, "reserve with alignment 0", lambda acl: acl.answer("aclrtReserveMemAddress", PAGE, PAGE, None, 0)
    ),
    "reserve at a place": Misuse(
        107000, "reserve anywhere", lambda acl: acl.answer("aclrtReserveMemAddress", PAGE, 0, 17 << 40, 0)
    ),
    "reserve with flags": Misuse(
        100000, "flags are zero", lambda acl: acl.answer("aclrtReserveMemAddress", PAGE, 0, None, 2)
    ),
    "reserve too much": Misuse(207001, "a reservation is at most 128 GiB", lambda acl: acl.reserve(129 * GIB)),
    "release inside": Misuse(107000, "release takes the exact start of a reservation", release_inside),
    "release mapped": Misuse(0, "unmap everything before release", release_mapped),
    "create half a page": Misuse(107000, "handles are whole pages of 2 MiB", lambda acl: acl.create(PAGE // 2)),
    "create nothing": Misuse(100000, "sizes are positive", lambda acl: acl.create(0)),
    "create with flags": Misuse(100000, "flags are zero", lambda acl: create(acl, flags=1)),
    "create plain HBM": Misuse(100000, "memory attributes are known ones", lambda acl: create(acl, attribute=1)),
    "create DDR on a device": Misuse(100000, "the attribute fits the location", lambda acl: create(acl, attribute=2)),
    "create posix": Misuse(100000, "handle type none, allocation type pinned", lambda acl: create(acl, handle_type=2)),
    "create reserved": Misuse(107000, "reserve is zero", lambda acl: create(acl, reserve=1)),
    "create on managed memory": Misuse(
        100000, "the location is a host or a device", lambda acl: create(acl, location=Location(0, 3))
    ),
    "create nowhere": Misuse(107001, "devices are visible ones", lambda acl: acl.create(properties=Properties.hbm(7))),
    "create without properties": Misuse(
        100000, "no null pointers", lambda acl: acl.answer("aclrtMallocPhysical", PAGE, None, 0)
    ),
    "destroy twice": Misuse(107017, "a handle is not used after FreePhysical", destroy_twice),
    "destroy twice, mapped": Misuse(107000, "a handle is not used after FreePhysical", destroy_twice_mapped),
    "map at an offset": Misuse(107000, "map from offset 0", lambda acl: map_at(acl, offset=PAGE)),
    "map with flags": Misuse(100000, "flags are zero", lambda acl: map_at(acl, flags=1)),
    "map nothing": Misuse(100000, "sizes are positive", lambda acl: map_at(acl, nbytes=0)),
    "map too much": Misuse(107000, "map the whole handle", lambda acl: map_at(acl, nbytes=2 * PAGE)),
    "map too little": Misuse(107000, "map the whole handle", lambda acl: map_at(acl, nbytes=PAGE // 2)),
    "map unaligned": Misuse(507899, "addresses are aligned to the page", lambda acl: map_at(acl, place=4096)),
    "map outside": Misuse(107000, "map inside a reservation", lambda acl: map_at(acl, place=COUNT * PAGE)),
    "map past the end": Misuse(
        507899, "map inside a reservation", lambda acl: acl.map(acl.reserve(PAGE), acl.create(2 * PAGE), 2 * PAGE)
    ),
    "map twice": Misuse(507899, "map only where nothing is mapped", map_twice),
    "map over": Misuse(507899, "map only where nothing is mapped", map_over),
    "map another device": Misuse(507899, "a reservation belongs to the device of its first map", map_other_device),
    "map a stale handle": Misuse(107017, "a handle is not used after FreePhysical", map_stale),
    "map a disowned handle": Misuse(107000, "a handle is not used after FreePhysical", map_disowned),
    "unmap inside": Misuse(507899, "unmap takes the exact start of a map", unmap_inside),
    "unmap unmapped": Misuse(507899, "unmap takes the exact start of a map", lambda acl: acl.unmap(acl.reserve(PAGE))),
    "unmap under queued work": Misuse(0, "no queued work on a page that is unmapped", unmap_under_work),
    "unmap under a copy": Misuse(
        507899, "no unmap while a copy runs on the page", lambda acl: while_copied(acl, mapped(acl)[0], acl.unmap)
    ),
    "copy half mapped": Misuse(
        507899, "copies want every byte mapped", lambda acl: acl.copy(acl.malloc(PAGE), half_mapped(acl), 2)
    ),
    "copy half mapped, queued": Misuse(507899, "copies want every byte mapped", copy_async_half_mapped),
    "fill half mapped": Misuse(507899, "copies want every byte mapped", lambda acl: acl.fill(half_mapped(acl), 1, 2)),
    "work on unmapped": Misuse(507015, "queued work finds its pages mapped", work_on_unmapped),
    "free inside": Misuse(107000, "free takes what malloc returned", free_inside),
    "free under queued work": Misuse(0, "no queued work on a block that is freed", free_under_work),
    "free under a copy": Misuse(
        507899, "no free while a copy runs on the block", lambda acl: while_copied(acl, acl.malloc(PAGE), acl.free)
    ),
    "malloc nothing": Misuse(100000, "sizes are positive", lambda acl: acl.malloc(0)),
    "malloc nothing on the host": Misuse(100000, "sizes are positive", lambda acl: acl.malloc_host(0)),
    "register nothing": Misuse(
        100000, "sizes are positive", lambda acl: acl.call("aclrtHostRegister", acl.malloc_host(64), 0, 0, None)
    ),
    "copy without room": Misuse(
        100000, "the destination has room", lambda acl: acl.call("aclrtMemcpy", acl.malloc(8), 4, acl.malloc(8), 8, 4)
    ),
    "fill without room": Misuse(
        100000, "the destination has room", lambda acl: acl.call("aclrtMemset", acl.malloc(8), 4, 1, 8)
    ),
    "free host memory twice": Misuse(107000, "give back what was taken", free_host_twice),
    "granularity of another kind": Misuse(
        207000, "the option is minimum or recommended", lambda acl: granularity(acl, 2)
    ),
    "read-only access": Misuse(207000, "access is read and write", lambda acl: set_access(acl, flags=1)),
    "access to half a map": Misuse(
        507899, "set access takes exactly one map", lambda acl: set_access(acl, nbytes=PAGE // 2)
    ),
    "retain inside": Misuse(507899, "retain takes the exact start of a map", retain_inside),
    "attributes of nothing": Misuse(
        507899, "ask about mapped addresses", lambda acl: attributes_of(acl, acl.reserve(PAGE))
    ),
}
