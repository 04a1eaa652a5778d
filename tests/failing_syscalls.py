"""Makes chosen system calls of this process fail, for good, by a seccomp filter: what a full or odd kernel would do."""

from __future__ import annotations

import ctypes
import platform
import struct

NUMBERS = {
    "x86_64": {"mmap": 9, "mprotect": 10, "munmap": 11, "madvise": 28, "fallocate": 285, "memfd_create": 319},
    "aarch64": {"mmap": 222, "mprotect": 226, "munmap": 215, "madvise": 233, "fallocate": 47, "memfd_create": 279},
}
MADV_POPULATE_WRITE, MADV_COLLAPSE = 23, 25
PUNCH_HOLE_KEEP_SIZE = 3

LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def fail_syscall(name: str, arguments: dict[int, int], errno: int) -> None:
    """From now on `name` returns -1 with `errno` whenever each argument `i` equals `arguments[i]`."""
    compares = [(0, NUMBERS[platform.machine()][name])]
    for index, value in arguments.items():
        compares += [(16 + 8 * index, value & 0xFFFFFFFF), (20 + 8 * index, value >> 32)]
    code = b""
    for done, (offset, value) in enumerate(compares, start=1):
        code += struct.pack("=HBBI", LOAD, 0, 0, offset)
        code += struct.pack("=HBBI", JUMP_IF_EQUAL, 0, 2 * (len(compares) - done) + 1, value)
    code += struct.pack("=HBBI", RETURN, 0, 0, ERRNO | errno) + struct.pack("=HBBI", RETURN, 0, 0, ALLOW)
    program = Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "the seccomp filter was refused")
