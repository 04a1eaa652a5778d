"""The emulator of this process and how tests of the acl driver leave it: no rule broken, nothing mapped or created.

Imports no torch, so that the child processes here start fast.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from ascendcl import Emulator
from driver_kinds import acl_library

from xllm_cli.errors import DeviceError
from xllm_cli.vmm.driver import open_driver

PAGE = 2 << 20
OUT_OF_MEMORY, DEVICE_OUT_OF_MEMORY, DRIVER_FAILED = 207001, 207018, 507899


@cache
def loaded() -> Emulator:
    """The library that the drivers of driver_kinds load."""
    return Emulator(acl_library().parents[1])


@contextmanager
def clean_emulator() -> Iterator[Emulator]:
    """Counts from zero; afterwards AssertionError if a rule was broken, or a page is left that was not there before."""
    emulator = loaded()
    emulator.reset()
    before = held(emulator)
    yield emulator
    broken = emulator.violations()
    emulator.reset()
    emulator.neighbour(-emulator.device()["neighbour"])
    assert broken == []
    assert held(emulator) == before, "pages are left"


def held(emulator: Emulator) -> tuple[int, int]:
    """(handles, mappings) that are alive."""
    leaks = emulator.leaks()
    return len(leaks.get("handles", ())), len(leaks.get("mappings", ()))


def child_opens(*options: str) -> None:
    try:
        info = open_driver("npu", device_index=int(options[0]) if options else 0).info()
    except DeviceError as error:
        assert error.exit_code == 1
        print(error)
    else:
        print(info.name, info.page_bytes)


def child_has_two_devices() -> None:
    emulator = Emulator(Path(os.environ["ASCEND_HOME_PATH"]))
    driver = open_driver("npu", library=emulator.path, device_index=1)
    emulator.library.aclrtSetDevice(0)
    driver.create(3)
    used = [device["used"] for device in emulator.report()["devices"]]
    driver.info()
    current = ctypes.c_int(-1)
    emulator.library.aclrtGetDevice(ctypes.byref(current))
    print(json.dumps([current.value, *used]))
