"""The emulated NPU: each rule of ACL's contract, and how memory behaves while they are kept."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from acl_calls import GIB, PAGE, Access, Acl, AclError, Location, Properties
from acl_misuse import MISUSES
from acl_session import clean_acl, code_of, variables
from ascendcl import SOURCES, build_emulator
from driver_kinds import ROOT, is_accessible, peek, poke


@pytest.fixture
def acl() -> Iterator[Acl]:
    with clean_acl() as started:
        yield started


def commit_all(mode: str) -> dict[str, tuple[int, str]]:
    command = [sys.executable, str(ROOT / "tests" / "acl_misuse.py"), str(build_emulator())]
    knobs = variables(mode=mode, devices=2)
    done = subprocess.run(command, env=knobs, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="session")
def hardware() -> dict[str, tuple[int, str]]:
    return commit_all("hardware")


@pytest.fixture(scope="session")
def strict() -> dict[str, tuple[int, str]]:
    return commit_all("strict")


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
    total = acl.emulator.device()["used"] + 2 * PAGE
    acl.emulator.set_total(total)
    handles = [acl.create(), acl.create()]
    assert code_of(acl.create) == 207001
    assert f"0 of {total} bytes free, {PAGE} are asked for [207001]" in acl.emulator.recent_text()
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
