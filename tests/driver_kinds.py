"""The drivers every test of the seam runs on, and how a test looks at raw memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from ascendcl import build_emulator

from xllm_cli.vmm.driver import HUGE_PAGE_BYTES, Driver, FaultyDriver, open_driver
from xllm_cli.vmm.simulated import SimulatedDriver

# faulty fails on demand and simulated has a size of its own, else they are small
HOST_KINDS = ("host-huge", "host-4k", "small", "faulty", "simulated")
KINDS = (*HOST_KINDS, "acl")  # acl: on the emulated Ascend runtime
ROOT = Path(__file__).parent.parent


def open_kind(kind: str, *, pages: int = 64, **options: Any) -> Driver:
    """A driver of this kind that may create at most `pages` pages. `options` are those of its opener."""
    if kind == "acl":
        return open_driver("npu", library=acl_library(), total_bytes=pages * HUGE_PAGE_BYTES, **options)
    big = {"host-huge": ("huge", HUGE_PAGE_BYTES), "host-4k": ("4k", HUGE_PAGE_BYTES)}
    mode, page_bytes = big.get(kind, ("auto", 4096))
    driver = open_driver("cpu", mode=mode, page_bytes=page_bytes, total_bytes=pages * page_bytes, **options)
    if kind == "simulated":
        return SimulatedDriver(driver, total_bytes=pages * page_bytes)
    return FaultyDriver(driver) if kind == "faulty" else driver


@cache
def acl_library() -> Path:
    return build_emulator() / "lib64" / "libascendcl.so"


def page_bytes_of(driver: Driver) -> int:
    return driver.info().page_bytes


def poke(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def peek(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def is_accessible(address: int) -> bool:
    """Whether a read would succeed: the kernel tries for us and says EFAULT where we would get SIGSEGV."""
    reader, writer = os.pipe()
    written = ctypes.CDLL(None, use_errno=True).write(writer, ctypes.c_void_p(address), 1)
    os.close(reader)
    os.close(writer)
    return bool(written == 1)


def count_vmas(address: int, nbytes: int) -> int:
    """Kernel mappings that overlap the range."""
    count = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
        count += start < address + nbytes and end > address
    return count


def run_child(function: str, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Call `module.function(*args)` in a fresh process: for tests that kill it or take its system calls away."""
    module, name = function.split(".")
    code = f"import sys, {module}; {module}.{name}(*sys.argv[1:])"
    paths = (str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, **options)
