"""The emulated NPU: what tests can script, what it reports, and several processes and threads on it."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from acl_calls import GIB, PAGE, Acl, AclError
from acl_session import PROLOGUE, clean_acl, code_of, in_threads, run_program, run_python, variables
from ascendcl import Neighbour
from driver_kinds import peek, poke


@pytest.fixture
def acl() -> Iterator[Acl]:
    with clean_acl() as started:
        yield started


def test_injected_calls_fail_and_do_nothing(acl: Acl) -> None:
    acl.emulator.inject("aclrtMallocPhysical", 207001, nth=2, count=2)
    free, _ = acl.memory()
    handle = acl.create()
    assert [code_of(acl.create) for _ in range(2)] == [207001, 207001]
    assert acl.memory()[0] == free - PAGE
    acl.destroy(acl.create())
    acl.destroy(handle)
    count = acl.emulator.counters()["aclrtMallocPhysical"]
    assert (count.calls, count.failed, count.injected) == (4, 2, 2)


def test_a_neighbour_moves_now_or_before_a_call(acl: Acl) -> None:
    free, _ = acl.memory()
    acl.emulator.neighbour(GIB)
    assert acl.memory()[0] == free - GIB
    acl.emulator.neighbour(-GIB)
    acl.emulator.neighbour(free, before="aclrtMallocPhysical", nth=2)
    acl.destroy(acl.create())
    assert code_of(acl.create) == 207001
    assert acl.emulator.device()["neighbour"] == free
    assert acl.emulator.device(1)["neighbour"] == 0


def test_a_delay_is_waited_in_the_call(acl: Acl) -> None:
    acl.emulator.delay("aclrtMallocPhysical", 0.1)
    start = time.monotonic()
    acl.destroy(acl.create())
    assert time.monotonic() - start >= 0.1


def test_fresh_memory_is_poisoned(acl: Acl) -> None:
    acl.emulator.script("poison 255")
    address, handle, block = acl.reserve(PAGE), acl.create(), acl.malloc(PAGE)
    acl.map(address, handle)
    assert peek(address, PAGE) == peek(block, PAGE) == b"\xff" * PAGE
    acl.unmap(address)
    acl.destroy(handle)
    acl.release(address)
    acl.free(block)


def test_a_line_that_cannot_be_read_is_named(acl: Acl) -> None:
    with pytest.raises(ValueError, match="cannot read 'inject aclrtMapMem 0 1'"):
        acl.emulator.script("inject aclrtMapMem 0 1")
    done = run_python("", script="total 5; explode now")
    assert (done.returncode, "XLLM_ACL_EMULATOR_SCRIPT: cannot read ' explode now'" in done.stderr) == (64, True)


def test_the_trace_is_the_ordered_list_of_calls(acl: Acl) -> None:
    address, handle = acl.reserve(PAGE), acl.create()
    with acl.emulator.tracing() as calls:
        acl.map(address, handle)
        acl.unmap(address)
    assert [(call["call"], call["arguments"], call["code"]) for call in calls] == [
        ("aclrtMapMem", [address, PAGE, 0, handle, 0], 0),
        ("aclrtUnmapMem", [address], 0),
    ]
    assert {call["thread"] for call in calls} == {threading.get_native_id()}
    acl.destroy(handle)
    acl.release(address)


def test_calls_with_the_interpreter_lock_held_are_counted(acl: Acl) -> None:
    count = ctypes.c_uint32()
    for loader in (ctypes.CDLL, ctypes.PyDLL):  # the second keeps the lock
        loader(str(acl.emulator.path)).aclrtGetDeviceCount(ctypes.byref(count))
    counted = acl.emulator.counters()["aclrtGetDeviceCount"]
    assert (counted.calls, counted.with_gil) == (2, 1)


def test_the_report_at_exit_names_what_was_left(tmp_path: Path) -> None:
    code = "range_, handle = acl.reserve(4 * PAGE), acl.create(); acl.map(range_ + PAGE, handle); print(range_)"
    done = run_python(code, report=tmp_path / "report-%p.json")
    address = int(done.stdout)
    (path,) = tmp_path.glob("report-*.json")
    live = json.loads(path.read_text())["live"]
    assert live["reservations"] == [{"address": address, "bytes": 4 * PAGE}]
    assert live["mappings"] == [{"address": address + PAGE, "bytes": PAGE}]
    assert [(one["bytes"], one["owners"], one["maps"]) for one in live["handles"]] == [(PAGE, 1, 1)]


@pytest.mark.parametrize(("mode", "told"), [("strict", True), ("hardware", False)])
def test_strict_mode_tells_of_leaks_by_itself(mode: str, told: bool) -> None:
    done = run_python("acl.create()", mode=mode)
    assert (done.returncode, "left at exit: {" in done.stderr) == (0, told)
    assert run_python("acl.destroy(acl.create())", mode=mode).stderr == ""


@pytest.mark.parametrize(("visible", "count"), [(None, 4), ("2,0", 2), ("1,9,0", 1), ("", 0)])
def test_the_visible_devices_are_chosen(visible: str | None, count: int) -> None:
    code = "n = ctypes.c_uint32(); acl.call('aclrtGetDeviceCount', ctypes.byref(n)); print(n.value)"
    chosen = {} if visible is None else {"ASCEND_RT_VISIBLE_DEVICES": visible}
    done = run_program(code, **variables(devices=4) | chosen)
    assert done.stdout == f"{count}\n", done.stderr


def test_processes_with_a_ledger_share_the_devices(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    code = "acl.create(); print(acl.memory()[0])"
    with Neighbour(path) as neighbour:
        neighbour.take(3 * PAGE)
        done = run_python(code, ledger=path, hbm_bytes=8 * PAGE)
        assert done.stdout == f"{4 * PAGE}\n", done.stderr
        neighbour.take(8 * PAGE)
        assert "207001" in run_python(code, ledger=path, hbm_bytes=8 * PAGE).stderr
    assert run_python(code, ledger=path, hbm_bytes=8 * PAGE).stdout == f"{7 * PAGE}\n"


IMPORTER = """
import os
acl.start()
handle = ctypes.c_uint64()
print(os.getpid(), flush=True)
sys.stdin.readline()
acl.call("aclrtMemImportFromShareableHandle", int(sys.argv[1]), 0, ctypes.byref(handle))
address = acl.reserve(PAGE)
acl.map(address, handle.value)
print(ctypes.string_at(address, 6).decode())
local = acl.create()
acl.unmap(address)
try:
    acl.map(address, local)
except AclError as error:
    print(error.code, acl.emulator.violations()[-1]["rule"])
"""


@pytest.mark.parametrize("listed", [True, False])
def test_a_handle_is_imported_by_a_listed_process_only(acl: Acl, listed: bool) -> None:
    address, handle, key = acl.reserve(PAGE), acl.create(), ctypes.c_uint64()
    acl.map(address, handle)
    poke(address, b"across")
    acl.call("aclrtMemExportToShareableHandle", handle, 0, 0, ctypes.byref(key))
    command = [sys.executable, "-c", PROLOGUE + IMPORTER, str(key.value)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=variables(), **pipes) as importer:
        process = (ctypes.c_int32 * 1)(int(importer.stdout.readline()))
        if listed:
            acl.call("aclrtMemSetPidToShareableHandle", key.value, process, 1)
        said, complaint = importer.communicate("go\n", timeout=60)
    if listed:
        assert said == "across\n507899 local and imported handles are not mixed in a reservation\n", complaint
    else:
        assert "AclError: aclrtMemImportFromShareableHandle: 507899" in complaint
    acl.unmap(address)
    acl.destroy(handle)
    acl.release(address)


def test_threads_map_and_unmap_at_once(acl: Acl) -> None:
    def work() -> None:
        acl.start()
        for _ in range(50):
            address, handle = acl.reserve(2 * PAGE), acl.create()
            acl.map(address + PAGE, handle)
            acl.fill(address + PAGE, 3, 4096)
            assert peek(address + PAGE, 4096) == b"\x03" * 4096
            acl.unmap(address + PAGE)
            acl.destroy(handle)
            acl.release(address)

    in_threads(4, work)
    assert acl.emulator.violations() == []
    assert acl.emulator.calls("aclrtMapMem") == 200


def test_threads_share_out_the_last_bytes(acl: Acl) -> None:
    acl.emulator.set_total(acl.emulator.device()["used"] + 50 * PAGE)
    handles: list[int] = []
    refused: list[int] = []

    def work() -> None:
        for _ in range(20):
            try:
                handles.append(acl.create())
            except AclError as error:
                refused.append(error.code)

    in_threads(4, work)
    assert (len(handles), refused) == (50, [207001] * 30)
    for handle in handles:
        acl.destroy(handle)


def test_a_context_is_bound_to_its_thread(acl: Acl) -> None:
    devices: list[int] = []
    device = ctypes.c_int32()

    def work() -> None:
        acl.start(1)
        acl.call("aclrtGetDevice", ctypes.byref(device))
        devices.append(device.value)

    in_threads(1, work)
    acl.call("aclrtGetDevice", ctypes.byref(device))
    assert (devices, device.value) == ([1], 0)
