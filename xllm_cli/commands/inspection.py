"""What a machine has for this program and what it lacks, read without torch and without changing anything.

Every function returns facts, whatever is absent: a fact with a `fix` is something missing, and the fix is how to get
it. What a device does when it is used is another process's to find out (`self_test`).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from xllm_cli import facts
from xllm_cli.flags import FLAGS
from xllm_cli.versions import ASCEND_DRIVER, cann_version, package_version, version_in, versions

PAGE_BYTES = 2 << 20
MAPPINGS_SHARE = 0.7  # of vm.max_map_count, what the driver uses at most
SELF_TEST_SECONDS = 300.0
SECRET = "(set)"
_VARIABLES = re.compile(r"(XLLM|ASCEND|HCCL|NCCL|OMP|GOMP|TORCH|PYTORCH)_\w+|(CUDA|NPU)_VISIBLE_DEVICES|LD_PRELOAD")
_KINDS = {"npu": ("Ascend NPUs", "davinci[0-9]*"), "cuda": ("NVIDIA GPUs", "nvidia[0-9]*")}  # kind, nodes in /dev


class Fact(NamedTuple):
    """One line of the report; `fix` is empty where nothing is missing."""

    name: str
    value: str
    fix: str = ""


def software() -> Iterator[Fact]:
    """Versions, and the packages that are declared and not installed."""
    yield from (Fact(name, version) for name, version in versions().items())
    yield Fact("kernel", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Fact("libc", " ".join(platform.libc_ver()))
    try:
        declared = importlib.metadata.requires("xllm") or []
    except importlib.metadata.PackageNotFoundError:
        yield Fact("packages", "run from a checkout: what it needs is not recorded", "make setup")
        return
    names = [re.split(r"[ <>=!~;\[(]", line)[0] for line in declared if "extra ==" not in line]
    missing = [name for name in names if not package_version(name)]
    fix = f"pip install {' '.join(missing)}" if missing else ""
    yield Fact("packages", f"{len(names) - len(missing)} of the {len(names)} that are needed", fix)


def host() -> Iterator[Fact]:
    """Processors, memory, and how the cpu device maps it. Of a container, what it may use."""
    yield Fact("processors", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}, {_cpu_model()}")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        from xllm_cli.vmm.driver import VmmError, open_driver, probe_host
    except ImportError as error:
        yield Fact("native modules", str(error), "make setup (needs g++): they are compiled when xllm is installed")
        return
    probe = probe_host()
    hint = "kernel 6.1 or newer with pages of 4 KiB; /sys/kernel/mm/transparent_hugepage/shmem_enabled not deny"
    mode = "huge" if probe.huge else "4k"
    yield Fact("host pages", mode if probe.huge else f"4k: {probe.reason}", "" if probe.huge else hint)
    try:
        driver = open_driver("cpu", mode=mode)
    except VmmError as error:
        yield Fact("memory", str(error), "see the error")
        return
    info = driver.info()
    driver.close()
    limit = f", limited from {_gib(machine)} by the container" if info.total < 0.99 * machine else ""
    yield Fact("memory", f"{_gib(info.total)}{limit}, {_gib(info.free)} free")
    yield from _mappings(info.total)


def _mappings(total: int) -> Iterator[Fact]:
    limit = _number("/proc/sys/vm/max_map_count")
    needed = int(total / PAGE_BYTES / MAPPINGS_SHARE)
    fix = f"sysctl -w vm.max_map_count={needed}: every scattered page is a mapping" if 0 < limit < needed else ""
    yield Fact("vm.max_map_count", str(limit), fix)


def limits() -> Iterator[Fact]:
    """What the kernel and the shell allow."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = "ulimit -n 65536: every open connection is a file"
    yield Fact("open files", _limit(files), few if files != resource.RLIM_INFINITY and files < 1024 else "")
    for name, which in (("address space", resource.RLIMIT_AS), ("data", resource.RLIMIT_DATA)):
        soft = resource.getrlimit(which)[0]
        bounded = soft != resource.RLIM_INFINITY
        fix = f"ulimit -{'v' if which == resource.RLIMIT_AS else 'd'} unlimited: addresses are reserved in advance"
        yield Fact(name, _limit(soft), fix if bounded else "")
    overcommit = _number("/proc/sys/vm/overcommit_memory")
    strict = "sysctl -w vm.overcommit_memory=0: with 2 the kernel may refuse memory that is free"
    yield Fact("vm.overcommit_memory", str(overcommit), strict if overcommit == 2 else "")
    for name in ("enabled", "shmem_enabled"):
        chosen = re.search(r"\[(\w+)\]", _text(f"/sys/kernel/mm/transparent_hugepage/{name}"))
        yield Fact(f"transparent huge pages {name}", chosen[1] if chosen else "unknown")


def devices(wanted: str) -> Iterator[Fact]:
    """Accelerators that can be seen. Of `wanted`, and of one that is there, everything that is missing."""
    for name, (kind, nodes) in _KINDS.items():
        count = len(list(Path("/dev").glob(nodes)))
        value = f"{count} {kind} in /dev"
        if not FLAGS["device"].is_supported(name):
            yield Fact(name, f"{value}; not supported yet", "--device=cpu" if name == wanted else "")
        else:
            yield Fact(name, value, "; ".join(_missing(count)) if count or name == wanted else "")
    driver = version_in(ASCEND_DRIVER)
    if driver:
        yield Fact("npu driver", driver)
    yield Fact("--device=auto", facts.resolve_device("auto"))


def _missing(count: int) -> Iterator[str]:
    """What an NPU still needs, in the order to get it."""
    if not count:
        yield "an NPU and its driver, and in a container access to /dev/davinci*"
    if not cann_version():
        yield "CANN's toolkit and `source set_env.sh` of it (ASCEND_HOME_PATH names none)"
    elif not facts.is_there("npu"):
        yield "a runtime that loads and shows a device: `npu-smi info` tells what the driver sees"
    if not package_version("torch-npu"):
        yield "pip install 'xllm[npu]'"


def variables(environment: Mapping[str, str] = os.environ) -> Iterator[Fact]:
    """Those that change what runs; of a key only that it is there."""
    for name, value in sorted(environment.items()):
        if _VARIABLES.fullmatch(name):
            yield Fact(name, SECRET if "KEY" in name or "TOKEN" in name else value)


def self_test(device: str) -> Iterator[Fact]:
    """What the device does when it is used, found out by a process of its own: a crash of it is a fact, too."""
    command = [sys.executable, "-m", "xllm_cli.worker.selftest", f"--device={device}"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SELF_TEST_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        yield Fact("self-test", f"did not end within {SELF_TEST_SECONDS:g} s", "look at the device's own log")
        return
    differs, fixes = False, {"device": f"what `devices` says about {device}", "failure": "report it with this text"}
    for line in ran.stdout.splitlines():
        found = json.loads(line)
        differs |= found.get("differs", False)
        expected = f"expected: {found.get('expected') or 'something else'}"
        yield Fact(found["name"], found["value"], fixes.get(found["name"], expected) if found.get("differs") else "")
    if ran.returncode and not differs:
        last = ran.stderr.strip().splitlines()[-1:] or [f"ended with status {ran.returncode}"]
        yield Fact("self-test", last[0], f"run: {' '.join(command[1:])}")


def _cpu_model() -> str:
    found = re.search(r"^(?:model name|CPU part)\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.machine()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: str) -> int:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else -1


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _gib(number: int) -> str:
    return f"{number / 2**30:.2f} GiB"
