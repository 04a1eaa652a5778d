"""Ways to break ACL's contract with devices, streams, graphs and other processes."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from acl_calls import PAGE, Acl, AclError
from acl_memory_misuse import Misuse


def in_fresh_thread(commit: Callable[[Acl], object]) -> Callable[[Acl], None]:
    def run(acl: Acl) -> None:
        failures: list[AclError] = []

        def catch() -> None:
            try:
                commit(acl)
            except AclError as error:
                failures.append(error)

        thread = threading.Thread(target=catch)
        thread.start()
        thread.join()
        raise failures[0]

    return run


def export(acl: Acl, handle: int, *, handle_type: int = 0, flags: int = 0) -> int:
    key = ctypes.c_uint64()
    acl.call("aclrtMemExportToShareableHandle", handle, handle_type, flags, ctypes.byref(key))
    return key.value


def imported(acl: Acl, key: int) -> int:
    out = ctypes.c_uint64()
    acl.call("aclrtMemImportFromShareableHandle", key, 0, ctypes.byref(out))
    return out.value


def export_twice(acl: Acl) -> None:
    handle = acl.create()
    export(acl, handle)
    export(acl, handle)


@contextmanager
def exporter(acl: Acl, flags: int) -> Iterator[int]:
    """What another process, alive while the block runs, exported."""
    keys, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, str(export(acl, acl.create(), flags=flags)).encode())
        signal.pause()
    try:
        yield int(os.read(keys, 32))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def mix_imported(acl: Acl) -> None:
    address = acl.reserve(2 * PAGE)
    with exporter(acl, 1) as key:
        acl.map(address, imported(acl, key))
        acl.map(address + PAGE, acl.create())


def import_unlisted(acl: Acl) -> None:
    with exporter(acl, 0) as key:
        imported(acl, key)


def destroyed_stream(acl: Acl) -> None:
    stream = acl.stream()
    acl.call("aclrtDestroyStream", stream)
    acl.synchronize(stream)


def destroyed_event(acl: Acl) -> None:
    event = acl.event()
    acl.call("aclrtDestroyEvent", event)
    acl.call("aclrtSynchronizeEvent", event)


def while_capturing(commit: Callable[[Acl, int], object]) -> Callable[[Acl], None]:
    def run(acl: Acl) -> None:
        stream = acl.stream()
        acl.call("aclmdlRICaptureBegin", stream, 0)
        try:
            commit(acl, stream)
        finally:
            out = ctypes.c_uint64()
            acl.emulator.library.aclmdlRICaptureEnd(ctypes.c_uint64(stream), ctypes.byref(out))

    return run


def capture(acl: Acl, stream: int, mode: int = 0) -> None:
    acl.call("aclmdlRICaptureBegin", stream, mode)


def end_capture(acl: Acl, stream: int) -> None:
    acl.call("aclmdlRICaptureEnd", stream, ctypes.byref(ctypes.c_uint64()))


def end_joined_capture(acl: Acl) -> None:
    first, second, event = acl.stream(), acl.stream(), acl.event()
    capture(acl, first)
    acl.call("aclrtRecordEvent", event, first)
    acl.call("aclrtStreamWaitEvent", second, event)
    end_capture(acl, second)


def end_capture_elsewhere(acl: Acl) -> None:
    stream = acl.stream()
    capture(acl, stream)
    in_fresh_thread(lambda acl: end_capture(acl, stream))(acl)


def synchronise_relaxed(acl: Acl) -> None:
    stream = acl.stream()
    capture(acl, stream, 2)
    acl.synchronize(stream)


def copy_pageable(acl: Acl, stream: int) -> None:
    pageable = ctypes.create_string_buffer(8)
    acl.copy_async(acl.malloc(8), ctypes.addressof(pageable), 8, stream)


def group(acl: Acl, stream: int) -> int:
    """A task group of one task, inside a capture."""
    out = ctypes.c_uint64()
    acl.call("aclmdlRICaptureTaskGrpBegin", stream)
    acl.emulator.launch([], stream=stream)
    acl.call("aclmdlRICaptureTaskGrpEnd", stream, ctypes.byref(out))
    return out.value


def group_twice(acl: Acl, stream: int) -> None:
    for _ in range(2):
        acl.call("aclmdlRICaptureTaskGrpBegin", stream)


def end_group(acl: Acl, stream: int) -> None:
    acl.call("aclmdlRICaptureTaskGrpEnd", stream, ctypes.byref(ctypes.c_uint64()))


def update_with_less(acl: Acl, stream: int) -> None:
    acl.call("aclmdlRICaptureTaskUpdateBegin", stream, group(acl, stream))
    acl.call("aclmdlRICaptureTaskUpdateEnd", stream)


MISUSES = {
    "memory without a device": Misuse(107002, "each thread sets its device", in_fresh_thread(Acl.memory)),
    "stream without a device": Misuse(107002, "each thread sets its device", in_fresh_thread(Acl.stream)),
    "malloc without a device": Misuse(
        107002, "each thread sets its device", in_fresh_thread(lambda acl: acl.malloc(PAGE))
    ),
    "reset too often": Misuse(107000, "reset what was set", lambda acl: acl.call("aclrtResetDevice", 1)),
    "export twice": Misuse(507899, "one export per handle", export_twice),
    "import at home": Misuse(507899, "import in another process", lambda acl: imported(acl, export(acl, acl.create()))),
    "export posix": Misuse(100000, "handle type none", lambda acl: export(acl, acl.create(), handle_type=2)),
    "import nothing": Misuse(107000, "import what was exported", lambda acl: imported(acl, 1 << 32 | 0xFFFF0001)),
    "import unlisted": Misuse(507899, "the exporter names the importers", import_unlisted),
    "mix local and imported": Misuse(507899, "local and imported handles are not mixed in a reservation", mix_imported),
    "destroyed stream": Misuse(107017, "handles are alive", destroyed_stream),
    "destroyed event": Misuse(107017, "handles are alive", destroyed_event),
    "synchronise while capturing": Misuse(
        107030, "no synchronous calls while capturing", while_capturing(lambda acl, stream: acl.synchronize(stream))
    ),
    "copy while capturing": Misuse(
        107030,
        "no synchronous calls while capturing",
        while_capturing(lambda acl, _: acl.fill(acl.malloc(64), 1, 64)),
    ),
    "copy pageable memory while capturing": Misuse(
        107030, "no synchronous calls while capturing", while_capturing(copy_pageable)
    ),
    "synchronise a relaxed capture": Misuse(107030, "no synchronise while capturing", synchronise_relaxed),
    "end no capture": Misuse(107029, "capture ends where it began", lambda acl: end_capture(acl, acl.stream())),
    "end a joined capture": Misuse(107036, "capture ends where it began", end_joined_capture),
    "end a capture elsewhere": Misuse(107038, "capture ends in the thread that began it", end_capture_elsewhere),
    "group without a capture": Misuse(107029, "task groups are captured", lambda acl: group(acl, acl.stream())),
    "group in a group": Misuse(107033, "one task group at a time", while_capturing(group_twice)),
    "end no group": Misuse(107033, "a task group ends after it began", while_capturing(end_group)),
    "update with less": Misuse(107033, "an update has as many tasks as its group", while_capturing(update_with_less)),
    "end no update": Misuse(
        107033,
        "an update ends after it began",
        lambda acl: acl.call("aclmdlRICaptureTaskUpdateEnd", acl.stream()),
    ),
    "capture twice": Misuse(
        107027,
        "one capture at a time",
        while_capturing(lambda acl, stream: acl.call("aclmdlRICaptureBegin", stream, 0)),
    ),
    "capture the default stream": Misuse(
        107030, "the default stream is not captured", lambda acl: acl.call("aclmdlRICaptureBegin", None, 0)
    ),
}
# What breaks a rule in a process that did nothing yet.
EARLY = {
    "device before init": Misuse(100001, "aclInit comes first", lambda acl: acl.call("aclrtSetDevice", 0)),
    "create before any device": Misuse(107017, "the process sets a device first", lambda acl: acl.create()),
}
