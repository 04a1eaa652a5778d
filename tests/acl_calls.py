"""ACL as Python calls it: `Acl.call("aclrtUnmapMem", address)` and short forms. Knows the ABI, not the emulator.

Sizes and addresses are bytes; every form raises AclError where the library returns a code other than 0.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ascendcl import Emulator

PAGE = 2 << 20
GIB = 1 << 30
HBM_MEM_HUGE = 4
DEVICE = 1


class AclError(Exception):
    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function}: {code}")
        self.function, self.code = function, code


class Location(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("type", ctypes.c_int32))


class Properties(ctypes.Structure):
    """What aclrtMallocPhysical wants to know."""

    _fields_ = (
        ("handle_type", ctypes.c_int32),
        ("allocation_type", ctypes.c_int32),
        ("attribute", ctypes.c_int32),
        ("location", Location),
        ("reserve", ctypes.c_uint64),
    )

    @classmethod
    def hbm(cls, device: int = 0) -> Properties:
        return cls(0, 0, HBM_MEM_HUGE, Location(device, DEVICE), 0)


class Access(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_int32), ("location", Location), ("reserved", ctypes.c_uint8 * 12))


@dataclass(frozen=True, slots=True)
class Acl:
    """The library of an emulator, ready for calls; `start` makes this thread's context."""

    emulator: Emulator

    def call(self, function: str, *arguments: object) -> None:
        """Integers travel as 64 bits, None as null, ctypes objects as they are."""
        entry = getattr(self.emulator.library, function)
        code = entry(*(ctypes.c_uint64(one) if isinstance(one, int) else one for one in arguments))
        if code != 0:
            raise AclError(function, code)

    def answer(self, function: str, *arguments: object) -> int:
        """A call whose first parameter is where the handle or address goes."""
        out = ctypes.c_uint64()
        self.call(function, ctypes.byref(out), *arguments)
        return out.value

    def start(self, device: int = 0) -> None:
        try:
            self.call("aclInit", None)
        except AclError as error:
            if error.code != 100002:
                raise
        self.call("aclrtSetDevice", device)

    def reserve(self, nbytes: int) -> int:
        return self.answer("aclrtReserveMemAddress", nbytes, 0, None, 0)

    def release(self, address: int) -> None:
        self.call("aclrtReleaseMemAddress", address)

    def create(self, nbytes: int = PAGE, properties: Properties | None = None) -> int:
        return self.answer("aclrtMallocPhysical", nbytes, ctypes.byref(properties or Properties.hbm()), 0)

    def destroy(self, handle: int) -> None:
        self.call("aclrtFreePhysical", handle)

    def map(self, address: int, handle: int, nbytes: int = PAGE) -> None:
        self.call("aclrtMapMem", address, nbytes, 0, handle, 0)

    def unmap(self, address: int) -> None:
        self.call("aclrtUnmapMem", address)

    def malloc(self, nbytes: int) -> int:
        return self.answer("aclrtMalloc", nbytes, 0)

    def free(self, address: int) -> None:
        self.call("aclrtFree", address)

    def malloc_host(self, nbytes: int) -> int:
        return self.answer("aclrtMallocHost", nbytes)

    def free_host(self, address: int) -> None:
        self.call("aclrtFreeHost", address)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self.call("aclrtMemcpy", to, nbytes, source, nbytes, 4)

    def copy_async(self, to: int, source: int, nbytes: int, stream: int | None = None) -> None:
        self.call("aclrtMemcpyAsync", to, nbytes, source, nbytes, 4, stream)

    def fill(self, address: int, value: int, nbytes: int) -> None:
        self.call("aclrtMemset", address, nbytes, value, nbytes)

    def stream(self) -> int:
        return self.answer("aclrtCreateStream")

    def event(self) -> int:
        return self.answer("aclrtCreateEventExWithFlag", 0)

    def synchronize(self, stream: int | None = None) -> None:
        self.call("aclrtSynchronizeStream", stream)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the thread's device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("aclrtGetMemInfo", 1, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def status(self, function: str, handle: int | None) -> int:
        """The answer of a query such as aclrtStreamQuery."""
        status = ctypes.c_int(-1)
        self.call(function, handle, ctypes.byref(status))
        return status.value
