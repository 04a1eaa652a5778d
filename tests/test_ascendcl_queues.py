"""The emulated NPU: copies, streams, events and graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
from acl_calls import PAGE, Acl
from acl_session import clean_acl, code_of
from driver_kinds import peek, poke

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture
def acl() -> Iterator[Acl]:
    with clean_acl() as started:
        yield started


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
