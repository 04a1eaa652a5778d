"""Pinned host memory of an Ascend device, and copies to and from it on streams of their own.

By the vendor's runtime itself and not by torch_npu: a queued copy that fails ends torch_npu's queue of launches for
good, and its allocator of pinned memory answers a shortage with a null pointer. Declares the little that it calls;
knows no weights, no pages and no torch stream.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_int, c_int32, c_size_t, c_void_p
from typing import Any

import torch

from xllm_cli.errors import DeviceError, MemoryShortage

LIBRARY = "libascendcl.so"
TO_DEVICE, TO_HOST = 1, 2
WAIT_SECONDS = 30.0  # for what is on its way, and a second more for each of so many bytes: far slower than any link
SLOWEST_BYTES = 256 << 20
OUT_OF_MEMORY = (207001, 207018)

# what a code of the vendor's runtime means for whoever runs the server
MEANINGS = {
    107001: "there is no such device; see ASCEND_RT_VISIBLE_DEVICES and `npu-smi info`",
    107002: "the thread has no device: an error of this program, please report it",
    207001: "the device has no memory left",
    207018: "the device has no memory left",
    507015: "a kernel touched memory that it must not, and the device's context is lost; start again and report it",
    507899: "the kernel driver refused; `dmesg` and the files in ~/ascend/log tell why",
}
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "aclrtSetDevice": (c_int32,),
    "aclrtMallocHost": (POINTER(c_void_p), c_size_t),
    "aclrtFreeHost": (c_void_p,),
    "aclrtCreateStream": (POINTER(c_void_p),),
    "aclrtDestroyStream": (c_void_p,),
    "aclrtMemcpyAsync": (c_void_p, c_size_t, c_void_p, c_size_t, c_int, c_void_p),
    "aclrtSynchronizeStreamWithTimeout": (c_void_p, c_int32),
}


class AclCopies:
    """What the runtime gives for copying. Every verb makes the calling thread the device's and gives up the interpreter
    lock; none waits but CopyStream.wait()."""

    def __init__(self, index: int, library: str = "") -> None:
        """`library` is the path of libascendcl.so, empty: where torch_npu has found it. DeviceError without it."""
        self._index = index
        try:
            opened = _open(library)
            self._functions = {name: getattr(opened, name) for name in _ARGUMENTS}
            self._recent_error = opened.aclGetRecentErrMsg
        except (OSError, AttributeError) as error:
            raise DeviceError(f"{LIBRARY} cannot be used for copies: {error}") from error
        for name, arguments in _ARGUMENTS.items():
            self._functions[name].argtypes = arguments
        self._recent_error.restype = c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the runtime. DeviceError says which, and what its code means."""
        self._checked("aclrtSetDevice", self._index)
        self._checked(name, *arguments)

    def _checked(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code != 0:
            said = self._recent_error() or b""
            text = " ".join(said.decode(errors="replace").split()) or MEANINGS.get(code, "no reason given")
            raise _Refused(code, f"npu {self._index}: {name}: {text} (code {code})")

    def allocate(self, nbytes: int) -> PinnedMemory:
        """So many bytes of pinned memory. MemoryShortage without, DeviceError if the device fails."""
        address = c_void_p()
        try:
            self.call("aclrtMallocHost", ctypes.byref(address), nbytes)
        except _Refused as error:
            if error.code not in OUT_OF_MEMORY:
                raise
            raise MemoryShortage(f"the host has no {nbytes} bytes of pinned memory: {error}") from error
        if not address.value:
            raise MemoryShortage(f"the host has no {nbytes} bytes of pinned memory")
        return PinnedMemory(self, address.value, nbytes)

    def stream(self) -> CopyStream:
        """A stream for copies. DeviceError if there is none."""
        handle = c_void_p()
        self.call("aclrtCreateStream", ctypes.byref(handle))
        return CopyStream(self, handle)


class _Refused(DeviceError):
    """With the vendor's code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class PinnedMemory:
    """Host memory that the device reads and writes by itself."""

    def __init__(self, copies: AclCopies, address: int, nbytes: int) -> None:
        self._copies = copies
        self.address = address
        self.nbytes = nbytes

    def tensor(self) -> torch.Tensor:
        """All of it as bytes, uint8 [nbytes]; not to be used after close()."""
        memory = (ctypes.c_char * self.nbytes).from_address(self.address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> bool:
        """Give it back, once no copy needs it; False if the runtime refuses: to be tried again."""
        if self.address:
            try:
                self._copies.call("aclrtFreeHost", self.address)
            except DeviceError:
                return False
            self.address = 0
        return True


class CopyStream:
    """Copies in the order in which they are begun, done when wait() has returned."""

    def __init__(self, copies: AclCopies, handle: c_void_p) -> None:
        self._copies = copies
        self._handle: c_void_p | None = handle
        self._bytes_under_way = 0

    def to_device(self, to: int, source: int, nbytes: int) -> None:
        """Begin to copy from pinned memory to the device's; both addresses stay valid until wait(). DeviceError."""
        self._begin(to, source, nbytes, TO_DEVICE)

    def to_host(self, to: int, source: int, nbytes: int) -> None:
        """Begin to copy from the device's memory to pinned memory, likewise."""
        self._begin(to, source, nbytes, TO_HOST)

    def _begin(self, to: int, source: int, nbytes: int, kind: int) -> None:
        self._copies.call("aclrtMemcpyAsync", to, nbytes, source, nbytes, kind, self._handle)
        self._bytes_under_way += nbytes

    def wait(self) -> None:
        """Return when all that was begun is done. DeviceError if it failed, or is not done for far too long; it may be
        under way still then."""
        if not self._bytes_under_way:
            return
        seconds = WAIT_SECONDS + self._bytes_under_way / SLOWEST_BYTES
        self._copies.call("aclrtSynchronizeStreamWithTimeout", self._handle, round(seconds * 1000))
        self._bytes_under_way = 0

    def close(self) -> bool:
        """End the stream once nothing is under way; False if something is, or the runtime refuses: to be tried
        again."""
        if self._handle is not None:
            try:
                self.wait()
                self._copies.call("aclrtDestroyStream", self._handle)
            except DeviceError:
                return False
            self._handle = None
        return True


def _open(library: str) -> ctypes.CDLL:
    """The library, where torch_npu found it: the loader's place, or that of the toolkit's environment."""
    error: OSError | None = None
    for path in [library] if library else _places():
        try:
            return ctypes.CDLL(path)
        except OSError as refused:
            error = error or refused
    assert error is not None
    raise error


def _places() -> Iterator[str]:
    yield LIBRARY
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if folder := os.environ.get(variable):
            yield f"{folder}/lib64/{LIBRARY}"
