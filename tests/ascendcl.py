"""The emulated Ascend NPU of tests/native/ascendcl/: builds its `libascendcl.so`, loads it, scripts it, reads it.

Every knob is in settings.h (environment, for other processes) and script.h (lines, while a process runs) beside the
sources; the report's fields are in report.h. Knows nothing of the product and nothing of torch_npu.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "tests" / "native" / "ascendcl"
CACHE = ROOT / "build" / "ascendcl"
FLAGS = ("-std=c++17", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
# what torch_npu is linked against besides libascendcl
SIBLINGS = ("libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so", "libacl_tdt_channel.so")
# folders that torch_npu wants to see in a toolkit
PARTS = ("opp", "runtime", "compiler")
# calls that CANN of that age does not have yet, by the source file that holds them
NEWER_THAN = {"7.0": ("vmm_shared.cc", "vmm_access.cc"), "8.0": ("vmm_access.cc",), "9.0": ()}
LEDGER_ROW = struct.Struct("<q16Q")
LEDGER_ROWS = 64


def build_emulator(cann: str = "9.0") -> Path:
    """The folder that plays `$ASCEND_HOME_PATH`: `lib64/` in it holds `libascendcl.so` and its siblings.

    `cann`, a key of NEWER_THAN, is the release whose calls it has. All are built once per state of the sources, by
    whichever of several processes comes first; raises CalledProcessError, the compiler's words are on stderr.
    """
    sources = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(repr((FLAGS, SIBLINGS, PARTS, NEWER_THAN)).encode())
    for path in sources:
        digest.update(path.name.encode() + path.read_bytes())
    folder = CACHE / digest.hexdigest()[:16]
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            scratch = CACHE / f"{folder.name}.part"
            shutil.rmtree(scratch, ignore_errors=True)
            build_releases([path for path in sources if path.suffix == ".cc"], scratch)
            scratch.rename(folder)
    return folder / cann


def build_releases(sources: list[Path], folder: Path) -> None:
    """Compile, then link a library for each release into a new folder."""
    compiler = os.environ.get("CXX", "g++")
    apart = set().union(*NEWER_THAN.values())
    common = [path for path in sources if path.name not in apart]
    # a few sources at a time, because most of the time goes into reading the same headers
    units = [common[::2], common[1::2], *([path] for path in sources if path.name in apart)]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as jobs:

        def compile_unit(unit: list[Path]) -> str:
            made = f"{scratch}/{unit[0].name}.o"
            text = "".join(f'#include "{path}"\n' for path in unit)
            command = [compiler, *FLAGS, "-x", "c++", "-c", "-", "-o", made]
            subprocess.run(command, input=text, text=True, check=True)
            return made

        objects = list(jobs.map(compile_unit, units))
        for cann, left_out in NEWER_THAN.items():
            kept = [made for unit, made in zip(units, objects, strict=True) if unit[0].name not in left_out]
            link(compiler, kept, folder / cann / "lib64")
            for name in PARTS:
                (folder / cann / name).mkdir()
            (folder / cann / "ascend_toolkit_install.info").write_text(
                f"package_name=Ascend-cann-toolkit\nversion={cann}\n"
            )


def link(compiler: str, objects: list[str], folder: Path) -> None:
    """Leave the library and its siblings, links to it, in a new folder."""
    folder.mkdir(parents=True)
    # no soname: who looks for `libascendcl.so` must not find the one that a test has loaded by its path
    options = ["-shared", f"-Wl,-z,defs,--version-script={SOURCES}/exports.map"]
    command = [compiler, *options, *objects, "-o", str(folder / "libascendcl.so"), "-ldl", "-pthread"]
    subprocess.run(command, check=True)
    for name in SIBLINGS:
        (folder / name).symlink_to("libascendcl.so")


def environment(home: Path, **knobs: object) -> dict[str, str]:
    """This process's environment plus what makes a program find the emulator; knobs as in settings.h, in lower case.

    environment(home, mode="strict", hbm_bytes=1 << 30) sets XLLM_ACL_EMULATOR_MODE and ..._HBM_BYTES.
    """
    paths = filter(None, (str(home / "lib64"), os.environ.get("LD_LIBRARY_PATH")))
    settings = {f"XLLM_ACL_EMULATOR_{name.upper()}": str(value) for name, value in knobs.items()}
    toolkit = {"ASCEND_HOME_PATH": str(home), "ASCEND_OPP_PATH": str(home / "opp")}  # as its set_env.sh sets them
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(paths), **toolkit, **settings}


@dataclass(frozen=True, slots=True)
class CallCount:
    """How often a vendor call was made, failed, was made to fail, and was made with the interpreter lock held."""

    calls: int
    failed: int
    injected: int
    with_gil: int


class Emulator:
    """The emulator in this process. Loading it twice gives the same one: it is one library."""

    def __init__(self, home: Path | None = None) -> None:
        self.path = (home or build_emulator()) / "lib64" / "libascendcl.so"
        self.library = ctypes.CDLL(str(self.path))
        for name in ("ascendcl_emulator_script", "ascendcl_emulator_report", "aclGetRecentErrMsg"):
            getattr(self.library, name).restype = ctypes.c_char_p

    def script(self, *lines: str) -> None:
        """Apply lines of script.h; raises ValueError at the first that cannot be read."""
        refused = self.library.ascendcl_emulator_script("\n".join(lines).encode())
        if refused is not None:
            raise ValueError(refused.decode())

    def inject(self, function: str, code: int, *, nth: int = 1, count: int = 1) -> None:
        """Calls nth, nth + 1, … (`count` of them, the next is 1) of the function do nothing and return the code."""
        self.script(f"inject {function} {nth} {code} {count}")

    def delay(self, function: str, seconds: float) -> None:
        """Every call of the function waits first; "copy" and "task" are the delays of running and of queued work."""
        self.script(f"delay {function} {round(seconds * 1e6)}")

    def neighbour(self, nbytes: int, *, device: int = 0, before: str = "now", nth: int = 1) -> None:
        """Somebody else takes device memory (negative: gives it back), now or just before a function's nth call."""
        when = before if before == "now" else f"{before} {nth}"
        self.script(f"neighbour {when} {nbytes} {device}")

    def set_total(self, nbytes: int) -> None:
        """Every device has this much memory from now on."""
        self.script(f"total {nbytes}")

    def report(self) -> dict[str, Any]:
        """Everything the emulator knows, as in report.h."""
        return dict(json.loads(self.library.ascendcl_emulator_report()))

    def counters(self) -> dict[str, CallCount]:
        """By name, only what was called since the last reset."""
        return {name: CallCount(**count) for name, count in self.report()["calls"].items()}

    def calls(self, function: str) -> int:
        count = self.counters().get(function)
        return count.calls if count else 0

    def device(self, number: int = 0) -> dict[str, int]:
        """Bytes of a device: total, free, used and peak (of this process), neighbour."""
        return dict(self.report()["devices"][number])

    def leaks(self) -> dict[str, list[dict[str, int]]]:
        """What is alive now and not empty: reservations, handles, mappings, blocks, host_blocks."""
        return {kind: live for kind, live in self.report()["live"].items() if isinstance(live, list) and live}

    def violations(self) -> list[dict[str, str]]:
        """Rules broken in hardware mode since the last reset: call, rule, text."""
        return list(self.report()["violations"])

    @contextmanager
    def tracing(self) -> Iterator[list[dict[str, Any]]]:
        """A list that holds, once the block ends, its calls in order: call, arguments, code, thread, gil."""
        calls: list[dict[str, Any]] = []
        before = len(self.report()["trace"])
        self.library.ascendcl_emulator_trace(1)
        try:
            yield calls
        finally:
            self.library.ascendcl_emulator_trace(0)
            calls += self.report()["trace"][before:]

    def launch(self, spans: Iterable[tuple[int, int]], *, stream: int | None = None) -> int:
        """Queue a kernel that touches these (address, bytes); returns the code."""
        flat = [number for span in spans for number in span]
        array = (ctypes.c_uint64 * len(flat))(*flat)
        launch = self.library.ascendcl_emulator_launch
        return int(launch(ctypes.c_void_p(stream), array, ctypes.c_size_t(len(flat) // 2), None, None))

    def recent_text(self) -> str:
        """What the last failed call of this thread had to say; reading clears it."""
        text: bytes | None = self.library.aclGetRecentErrMsg()
        return text.decode() if text else ""

    def reset(self) -> None:
        """Forget counts, trace, violations, script and device faults; memory, streams and graphs stay."""
        self.library.ascendcl_emulator_reset()


class Neighbour:
    """Another user of the devices of every process that names the same XLLM_ACL_EMULATOR_LEDGER file."""

    def __init__(self, path: Path) -> None:
        path.touch(mode=0o600)
        os.truncate(path, LEDGER_ROW.size * LEDGER_ROWS)
        with open(path, "r+b") as file:
            self.rows = mmap.mmap(file.fileno(), 0)
        free = (row for row in range(LEDGER_ROWS) if self.read(row)[0] == 0)
        self.row = next(free)
        self.take(0)

    def read(self, row: int) -> tuple[int, ...]:
        return LEDGER_ROW.unpack_from(self.rows, row * LEDGER_ROW.size)

    def take(self, nbytes: int, device: int = 0) -> None:
        """Hold this many bytes of the device, in place of what was held before."""
        taken = [0] * 16
        taken[device] = nbytes
        LEDGER_ROW.pack_into(self.rows, self.row * LEDGER_ROW.size, os.getpid(), *taken)

    def used(self, device: int = 0) -> int:
        """Bytes that all processes hold together, this neighbour's among them."""
        return sum(self.read(row)[1 + device] for row in range(LEDGER_ROWS))

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        LEDGER_ROW.pack_into(self.rows, self.row * LEDGER_ROW.size, 0, *[0] * 16)
        self.rows.close()
