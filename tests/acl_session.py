"""Using the emulated NPU from tests: in this process, and in others."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from acl_calls import GIB, Acl, AclError
from ascendcl import Emulator, build_emulator, environment
from driver_kinds import ROOT

PROLOGUE = """
import ctypes, os, sys
from pathlib import Path
from acl_calls import *
from ascendcl import Emulator
acl = Acl(Emulator(Path(os.environ["ASCEND_HOME_PATH"])))
"""
DEFAULTS = ("mode hardware", "streams immediate", "driver 26", "poison none", f"total {8 * GIB}")


@contextmanager
def clean_acl() -> Iterator[Acl]:
    """This process's emulator with two devices of 8 GiB; afterwards AssertionError if anything is left in it."""
    acl = Acl(Emulator(build_emulator()))
    acl.emulator.reset()
    acl.emulator.script(*DEFAULTS, "devices 2")
    acl.start()
    before = acl.emulator.leaks()
    yield acl
    acl.emulator.reset()
    acl.emulator.neighbour(-acl.emulator.device()["neighbour"])
    acl.start()
    acl.emulator.script(*DEFAULTS, "devices 1")
    assert acl.emulator.leaks() == before


def code_of(call: Callable[[], object]) -> int:
    """The code an ACL call fails with."""
    with pytest.raises(AclError) as failure:
        call()
    return failure.value.code


def variables(**knobs: object) -> dict[str, str]:
    """The environment of a program that uses the emulator; knobs as in ascendcl.environment."""
    paths = os.pathsep.join((str(ROOT / "tests"), str(ROOT)))
    return {**environment(build_emulator(), **knobs), "PYTHONPATH": paths}


def run_program(code: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Python code that finds `acl` loaded but not started, in a process of its own."""
    command = [sys.executable, "-c", PROLOGUE + code]
    return subprocess.run(command, env={**variables(), **more}, capture_output=True, text=True, timeout=60)


def run_python(code: str, **knobs: object) -> subprocess.CompletedProcess[str]:
    """Python code that finds `acl` started, in a process whose emulator has these knobs."""
    return run_program("acl.start()\n" + code, **variables(**knobs))


def in_threads(count: int, work: Callable[[], None]) -> None:
    """Run it in several threads; whatever one raises is raised here."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]
