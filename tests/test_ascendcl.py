"""The emulated NPU: each rule of ACL's contract, what tests can script, and what it reports."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from acl_calls import GIB, PAGE, Access, Acl, AclError, Location, Properties
from acl_misuse import MISUSES
from ascendcl import SOURCES, Emulator, Neighbour, build_emulator, environment
from driver_kinds import ROOT, is_accessible, peek, poke

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture(scope="session")
def home() -> Path:
    return build_emulator()


@pytest.fixture
def acl(home: Path) -> Iterator[Acl]:
    """The emulator of this process with two devices of 8 GiB; a test leaves nothing behind in it."""
    acl = Acl(Emulator(home))
    acl.emulator.reset()
    acl.emulator.script(
        "mode hardware", "streams immediate", "driver 26", "poison none", "devices 2", f"total {8 * GIB}"
    )
    acl.start()
    before = acl.emulator.leaks()
    yield acl
    acl.emulator.reset()
    acl.emulator.script("streams immediate", "poison none")
    acl.emulator.neighbour(-(1 << 50))
    assert acl.emulator.leaks() == before


def code_of(call: Callable[[], object]) -> int:
    """The code an ACL call fails with."""
    with pytest.raises(AclError) as failure:
        call()
    return failure.value.code


PROLOGUE = """
import ctypes, sys
from pathlib import Path
from acl_calls import *
from ascendcl import Emulator
acl = Acl(Emulator(Path({home!r})))
"""


def run_python(code: str, home: Path, **knobs: object) -> subprocess.CompletedProcess[str]:
    """A program that has `acl` started on the emulator, in a process of its own."""
    program = PROLOGUE.format(home=str(home)) + "acl.start()\n" + code
    variables = {**environment(home, **knobs), "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)


# --- the contract


def commit_all(home: Path, mode: str) -> dict[str, tuple[int, str]]:
    command = [sys.executable, str(ROOT / "tests" / "acl_misuse.py"), str(home)]
    knobs = environment(home, mode=mode, devices=2)
    done = subprocess.run(command, env=knobs, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="session")
def hardware(home: Path) -> dict[str, tuple[int, str]]:
    return commit_all(home, "hardware")


@pytest.fixture(scope="session")
def strict(home: Path) -> dict[str, tuple[int, str]]:
    return commit_all(home, "strict")


@pytest.mark.parametrize("name", MISUSES)
def test_hardware_mode_gives_the_vendors_code(hardware: dict[str, tuple[int, str]], name: str) -> None:
    misuse = MISUSES[name]
    assert tuple(hardware[name]) == (0, f"{misuse.code} {misuse.rule}\n")


@pytest.mark.parametrize("name", MISUSES)
def test_strict_mode_aborts_and_names_the_rule(strict: dict[str, tuple[int, str]], name: str) -> None:
    status, said = strict[name]
    assert status == -6
    assert f"broke the rule '{MISUSES[name].rule}': " in said


def test_every_rule_of_the_sources_is_broken_by_a_misuse() -> None:
    sources = "".join(path.read_text() for path in SOURCES.glob("*.cc"))
    rules = re.findall(r'(?:violate\(\s*k\w+|note_violation\([^,]+|exact\(address), "([^"]+)"', sources)
    assert len(rules) > 80 and set(rules) == {misuse.rule for misuse in MISUSES.values()}


def test_two_maps_of_a_handle_are_the_same_bytes(acl: Acl) -> None:
    address, handle = acl.reserve(4 * PAGE), acl.create()
    for place in (0, 3):
        acl.map(address + place * PAGE, handle)
    poke(address + 5, b"shared")
    assert peek(address + 3 * PAGE + 5, 6) == b"shared"
    for place in (0, 3):
        acl.unmap(address + place * PAGE)
    acl.destroy(handle)
    acl.release(address)


def test_contents_move_with_the_handle_and_unmapped_pages_are_closed(acl: Acl) -> None:
    address, handle = acl.reserve(2 * PAGE), acl.create()
    acl.map(address, handle)
    poke(address, b"moved")
    acl.unmap(address)
    assert not is_accessible(address)
    acl.map(address + PAGE, handle)
    assert peek(address + PAGE, 5) == b"moved"
    acl.unmap(address + PAGE)
    acl.destroy(handle)
    acl.release(address)


def test_memory_is_taken_until_the_last_unmap(acl: Acl) -> None:
    free, total = acl.memory()
    address, handle = acl.reserve(2 * PAGE), acl.create()
    acl.map(address, handle)
    acl.map(address + PAGE, handle)
    acl.destroy(handle)
    acl.unmap(address)
    assert acl.memory() == (free - PAGE, total)
    acl.unmap(address + PAGE)
    assert acl.memory() == (free, total)
    acl.release(address)


def test_a_retained_handle_has_an_owner_more(acl: Acl) -> None:
    address, handle = acl.reserve(PAGE), acl.create()
    acl.map(address, handle)
    retained = ctypes.c_uint64()
    acl.call("aclrtMemRetainAllocationHandle", address, ctypes.byref(retained))
    acl.unmap(address)
    acl.destroy(handle)
    acl.destroy(retained.value)
    assert code_of(lambda: acl.destroy(handle)) == 107017
    acl.release(address)


def test_there_are_five_and_a_quarter_tebibytes_of_addresses(acl: Acl) -> None:
    ranges = [acl.reserve(128 * GIB) for _ in range(41)]
    while True:
        try:
            ranges.append(acl.reserve(GIB))
        except AclError as error:
            assert error.code == 207001
            break
    assert 5376 - 128 < sum(128 if index < 41 else 1 for index in range(len(ranges))) <= 5376
    for address in ranges:
        acl.release(address)
    acl.release(acl.reserve(128 * GIB))


def test_out_of_memory_is_told_with_numbers(acl: Acl) -> None:
    acl.emulator.set_total(2 * PAGE)
    handles = [acl.create(), acl.create()]
    assert code_of(acl.create) == 207001
    assert f"0 of {2 * PAGE} bytes free, {PAGE} are asked for [207001]" in acl.emulator.recent_text()
    assert acl.emulator.recent_text() == ""
    for handle in handles:
        acl.destroy(handle)
    assert acl.emulator.violations() == []


def test_a_gigabyte_page_is_rounded_and_aligned(acl: Acl) -> None:
    properties = Properties.hbm()
    properties.attribute = 10
    handle = acl.create(PAGE, properties)
    assert acl.emulator.leaks()["handles"][-1]["bytes"] == GIB
    address = acl.reserve(2 * GIB)
    assert code_of(lambda: acl.map(address + PAGE, handle, GIB)) == 507899
    acl.map(address + GIB, handle, GIB)
    acl.unmap(address + GIB)
    acl.destroy(handle)
    acl.release(address)


def test_a_map_without_access_opens_with_set_access(acl: Acl) -> None:
    address, handle = acl.reserve(PAGE), acl.create()
    acl.call("aclrtMemMapNoAccess", address, PAGE, 0, handle, 0)
    assert code_of(lambda: acl.fill(address, 1, 8)) == 507899
    acl.call("aclrtMemSetAccess", address, PAGE, ctypes.byref(Access(3, Location(0, 1))), 1)
    acl.fill(address, 1, 8)
    assert peek(address, 8) == b"\x01" * 8
    acl.unmap(address)
    acl.destroy(handle)
    acl.release(address)


def test_an_operator_is_refused_and_never_computes_garbage(acl: Acl) -> None:
    assert code_of(lambda: acl.call("aclopCompileAndExecute", None, 0)) == 500001
    assert "no operators" in acl.emulator.recent_text()


def test_older_releases_lack_the_later_calls() -> None:
    has = {}
    for cann in ("7.0", "8.0", "9.0"):
        library = ctypes.CDLL(str(build_emulator(cann) / "lib64" / "libascendcl.so"))
        names = ("aclrtMapMem", "aclrtMemGetAllocationGranularity", "aclrtMemSetAccess")
        has[cann] = [hasattr(library, name) for name in names]
    assert has == {"7.0": [True, False, False], "8.0": [True, True, False], "9.0": [True, True, True]}


def test_an_old_driver_refuses_what_needs_a_new_one(acl: Acl) -> None:
    acl.emulator.script("driver 25")
    out = ctypes.c_uint64()
    assert code_of(lambda: acl.call("aclrtMemRetainAllocationHandle", 4096, ctypes.byref(out))) == 207000
    assert acl.emulator.violations() == []


# --- copies, streams, events, graphs


def test_copies_go_everywhere(acl: Acl) -> None:
    host, first, second = acl.malloc_host(64), acl.malloc(64), acl.malloc(64)
    poke(host, bytes(range(64)))
    acl.copy(first, host, 64)
    acl.copy_async(second, first, 64)
    acl.synchronize()
    acl.copy(host, second, 32)
    assert peek(second, 64) == bytes(range(64))
    acl.free_host(host)
    acl.free(first)
    acl.free(second)


def test_lazy_work_waits_until_somebody_does(acl: Acl) -> None:
    acl.emulator.script("streams lazy")
    host, block = acl.malloc_host(4), acl.malloc(4)
    poke(host, b"late")
    acl.copy_async(block, host, 4)
    assert (peek(block, 4), acl.emulator.report()["live"]["pending"]) == (bytes(4), 1)
    acl.synchronize()
    assert (peek(block, 4), acl.emulator.report()["live"]["pending"]) == (b"late", 0)
    acl.free_host(host)
    acl.free(block)


def test_a_queued_copy_of_pageable_memory_is_done_when_it_returns(acl: Acl) -> None:
    acl.emulator.script("streams lazy")
    block, pageable = acl.malloc(4), ctypes.create_string_buffer(b"here", 4)
    acl.copy_async(block, ctypes.addressof(pageable), 4)
    assert peek(block, 4) == b"here"
    assert code_of(lambda: acl.copy_async(ctypes.addressof(pageable), ctypes.addressof(pageable), 4)) == 207000
    acl.free(block)


def test_delayed_work_is_not_ready_and_a_wait_can_run_out(acl: Acl) -> None:
    acl.emulator.delay("task", 0.3)
    stream = acl.stream()
    acl.emulator.launch([], stream=stream)
    assert acl.status("aclrtStreamQuery", stream) == 1
    assert code_of(lambda: acl.call("aclrtSynchronizeStreamWithTimeout", stream, 1)) == 107020
    acl.synchronize(stream)
    assert acl.status("aclrtStreamQuery", stream) == 0
    acl.call("aclrtDestroyStream", stream)


def test_an_event_orders_two_streams(acl: Acl) -> None:
    acl.emulator.script("streams lazy")
    order: list[int] = []
    first, second, event = acl.stream(), acl.stream(), acl.event()
    note = KERNEL(lambda number: order.append(number))
    acl.call("aclrtLaunchHostFunc", first, note, 1)
    acl.call("aclrtRecordEvent", event, first)
    acl.call("aclrtStreamWaitEvent", second, event)
    acl.call("aclrtLaunchHostFunc", second, note, 2)
    acl.synchronize(second)
    assert (order, acl.status("aclrtQueryEventStatus", event)) == ([1, 2], 1)
    for function, handle in (("Stream", first), ("Stream", second), ("Event", event)):
        acl.call(f"aclrtDestroy{function}", handle)


def test_elapsed_time_counts_the_delay_between_two_events(acl: Acl) -> None:
    start, end, milliseconds = acl.event(), acl.event(), ctypes.c_float()
    assert code_of(lambda: acl.call("aclrtEventElapsedTime", ctypes.byref(milliseconds), start, end)) == 107000
    acl.call("aclrtRecordEvent", start, None)
    acl.emulator.delay("task", 0.05)
    acl.call("aclrtRecordEvent", end, None)
    acl.call("aclrtSynchronizeEvent", end)
    acl.call("aclrtEventElapsedTime", ctypes.byref(milliseconds), start, end)
    assert 45 < milliseconds.value < 5000
    for event in (start, end):
        acl.call("aclrtDestroyEvent", event)


def test_a_device_fault_stays(acl: Acl) -> None:
    address = acl.reserve(PAGE)
    acl.emulator.launch([(address, 64)])
    for _ in range(2):
        assert code_of(acl.synchronize) == 507015
        assert "MTE DDR address out of range" in acl.emulator.recent_text()
    acl.emulator.reset()
    acl.synchronize()
    acl.release(address)


def capture(acl: Acl, stream: int, work: Callable[[], object]) -> int:
    acl.call("aclmdlRICaptureBegin", stream, 0)
    work()
    graph = ctypes.c_uint64()
    acl.call("aclmdlRICaptureEnd", stream, ctypes.byref(graph))
    return graph.value


def test_a_graph_runs_what_was_captured_each_time(acl: Acl) -> None:
    host, block, stream = acl.malloc_host(1), acl.malloc(1), acl.stream()
    graph = capture(acl, stream, lambda: acl.copy_async(block, host, 1, stream))
    seen = []
    for value in (b"a", b"b"):
        poke(host, value)
        acl.call("aclmdlRIExecuteAsync", graph, stream)
        acl.synchronize(stream)
        seen.append(peek(block, 1))
    assert seen == [b"a", b"b"]
    acl.call("aclmdlRIDestroy", graph)
    acl.call("aclrtDestroyStream", stream)
    acl.free_host(host)
    acl.free(block)


def test_a_second_stream_joins_a_capture_through_an_event(acl: Acl) -> None:
    first, second, event = acl.stream(), acl.stream(), acl.event()
    status, graph = ctypes.c_int(), ctypes.c_uint64()
    acl.call("aclmdlRICaptureBegin", first, 0)
    acl.call("aclrtRecordEvent", event, first)
    acl.call("aclrtStreamWaitEvent", second, event)
    acl.call("aclmdlRICaptureGetInfo", second, ctypes.byref(status), None)
    assert status.value == 1
    acl.call("aclmdlRICaptureEnd", first, ctypes.byref(graph))
    acl.call("aclmdlRICaptureGetInfo", second, ctypes.byref(status), None)
    assert status.value == 0
    for function, handle in (("rtDestroyStream", first), ("rtDestroyStream", second), ("rtDestroyEvent", event)):
        acl.call(f"acl{function}", handle)
    acl.call("aclmdlRIDestroy", graph.value)


def test_a_task_group_is_replaced_between_replays(acl: Acl) -> None:
    seen: list[int] = []
    note, stream, group = KERNEL(seen.append), acl.stream(), ctypes.c_uint64()

    def work() -> None:
        acl.call("aclmdlRICaptureTaskGrpBegin", stream)
        acl.call("aclrtLaunchHostFunc", stream, note, 1)
        acl.call("aclmdlRICaptureTaskGrpEnd", stream, ctypes.byref(group))
        acl.call("aclrtLaunchHostFunc", stream, note, 9)

    graph = capture(acl, stream, work)
    acl.call("aclmdlRIExecuteAsync", graph, stream)
    acl.call("aclmdlRICaptureTaskUpdateBegin", stream, group.value)
    acl.call("aclrtLaunchHostFunc", stream, note, 2)
    acl.call("aclmdlRICaptureTaskUpdateEnd", stream)
    acl.call("aclmdlRIExecuteAsync", graph, stream)
    assert seen == [1, 9, 2, 9]
    acl.call("aclmdlRIDestroy", graph)
    acl.call("aclrtDestroyStream", stream)


def test_a_page_taken_from_under_a_graph_is_found_at_the_replay(acl: Acl) -> None:
    address, handle, stream = acl.reserve(PAGE), acl.create(), acl.stream()
    acl.map(address, handle)
    graph = capture(acl, stream, lambda: acl.emulator.launch([(address, 64)], stream=stream))
    acl.unmap(address)
    acl.call("aclmdlRIExecuteAsync", graph, stream)
    assert code_of(lambda: acl.synchronize(stream)) == 507015
    acl.emulator.reset()
    acl.call("aclmdlRIDestroy", graph)
    acl.call("aclrtDestroyStream", stream)
    acl.destroy(handle)
    acl.release(address)


# --- what tests can script


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


def test_a_line_that_cannot_be_read_is_named(acl: Acl, home: Path) -> None:
    with pytest.raises(ValueError, match="cannot read 'inject aclrtMapMem 0 1'"):
        acl.emulator.script("inject aclrtMapMem 0 1")
    done = run_python("", home, script="total 5; explode now")
    assert (done.returncode, "XLLM_ACL_EMULATOR_SCRIPT: cannot read ' explode now'" in done.stderr) == (64, True)


# --- what it reports


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


def test_the_report_at_exit_names_what_was_left(home: Path, tmp_path: Path) -> None:
    code = "range_, handle = acl.reserve(4 * PAGE), acl.create(); acl.map(range_ + PAGE, handle); print(range_)"
    done = run_python(code, home, report=tmp_path / "report-%p.json")
    address = int(done.stdout)
    (path,) = tmp_path.glob("report-*.json")
    live = json.loads(path.read_text())["live"]
    assert live["reservations"] == [{"address": address, "bytes": 4 * PAGE}]
    assert live["mappings"] == [{"address": address + PAGE, "bytes": PAGE}]
    assert [(one["bytes"], one["owners"], one["maps"]) for one in live["handles"]] == [(PAGE, 1, 1)]


@pytest.mark.parametrize(("mode", "told"), [("strict", True), ("hardware", False)])
def test_strict_mode_tells_of_leaks_by_itself(home: Path, mode: str, told: bool) -> None:
    done = run_python("acl.create()", home, mode=mode)
    assert (done.returncode, "left at exit: {" in done.stderr) == (0, told)
    assert run_python("acl.destroy(acl.create())", home, mode=mode).stderr == ""


@pytest.mark.parametrize(("visible", "count"), [(None, 4), ("2,0", 2), ("1,9,0", 1), ("", 0)])
def test_the_visible_devices_are_chosen(home: Path, visible: str | None, count: int) -> None:
    code = "n = ctypes.c_uint32(); acl.call('aclrtGetDeviceCount', ctypes.byref(n)); print(n.value)"
    program = PROLOGUE.format(home=str(home)) + code
    knobs = {**environment(home, devices=4), "PYTHONPATH": str(ROOT / "tests")}
    if visible is not None:
        knobs["ASCEND_RT_VISIBLE_DEVICES"] = visible
    done = subprocess.run([sys.executable, "-c", program], env=knobs, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{count}\n", done.stderr


# --- processes and threads


def test_processes_with_a_ledger_share_the_devices(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    code = "acl.create(); print(acl.memory()[0])"
    with Neighbour(path) as neighbour:
        neighbour.take(3 * PAGE)
        done = run_python(code, home, ledger=path, hbm_bytes=8 * PAGE)
        assert done.stdout == f"{4 * PAGE}\n", done.stderr
        neighbour.take(8 * PAGE)
        assert "207001" in run_python(code, home, ledger=path, hbm_bytes=8 * PAGE).stderr
    assert run_python(code, home, ledger=path, hbm_bytes=8 * PAGE).stdout == f"{7 * PAGE}\n"


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
def test_a_handle_is_imported_by_a_listed_process_only(acl: Acl, home: Path, listed: bool) -> None:
    address, handle, key = acl.reserve(PAGE), acl.create(), ctypes.c_uint64()
    acl.map(address, handle)
    poke(address, b"across")
    acl.call("aclrtMemExportToShareableHandle", handle, 0, 0, ctypes.byref(key))
    command = [sys.executable, "-c", PROLOGUE.format(home=str(home)) + IMPORTER, str(key.value)]
    knobs = {**environment(home), "PYTHONPATH": str(ROOT / "tests")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=knobs, **pipes) as importer:
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
    acl.emulator.set_total(50 * PAGE)
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
