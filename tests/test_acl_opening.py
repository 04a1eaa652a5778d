"""Opening an Ascend device: where the library is found, what is said when there is no device, which pages it has."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import pytest
from acl_emulation import DRIVER_FAILED, PAGE, clean_emulator
from ascendcl import Emulator, build_emulator
from driver_kinds import acl_library, open_kind, poke, run_child

from xllm_cli._vmm import probe_acl
from xllm_cli.errors import DeviceError
from xllm_cli.vmm.driver import open_driver


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with clean_emulator() as emulator:
        yield emulator


@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH"])
def test_the_library_is_found_as_the_toolkit_sets_it_up(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = acl_library().parents[1]
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(home / "lib64" if variable == "LD_LIBRARY_PATH" else home))
    child = run_child("acl_emulation.child_opens")
    assert child.stdout == f"acl {PAGE}\n", child.stderr


def test_without_the_library_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", "/nowhere")
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    (message,) = run_child("acl_emulation.child_opens").stdout.splitlines()
    for part in (
        "libascendcl.so",
        "/nowhere/lib64",
        "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
        "--device=cpu",
    ):
        assert part in message
    for node in ("/dev/davinci[0-9]*", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"):
        assert node in message


def test_a_library_that_is_another_is_named() -> None:
    with pytest.raises(DeviceError, match="no function aclInit"):
        open_driver("npu", library="libc.so.6")


@pytest.mark.parametrize(("function", "code"), [("aclInit", 100039), ("aclrtGetDeviceCount", 507033)])
def test_a_runtime_that_does_not_start_is_no_device(emulator: Emulator, function: str, code: int) -> None:
    emulator.inject(function, code)
    assert probe_acl(str(acl_library())).num_devices == 0
    emulator.inject(function, code)
    with pytest.raises(DeviceError, match=rf"{function}: .*\(code {code}\).*set_env.sh"):
        open_kind("acl")


@pytest.mark.parametrize("function", ["aclrtSetDevice", "aclrtGetMemInfo", "aclrtMemGetAllocationGranularity"])
def test_a_device_that_does_not_open_is_named(emulator: Emulator, function: str) -> None:
    failures: list[str] = []

    def fresh_thread() -> None:
        emulator.inject(function, DRIVER_FAILED)
        try:
            open_kind("acl")
        except DeviceError as error:
            failures.append(str(error))

    thread = threading.Thread(target=fresh_thread)
    thread.start()
    thread.join(20)
    (failure,) = failures
    assert failure.startswith("npu:0 cannot be used: info: ") and function in failure and str(DRIVER_FAILED) in failure


def test_the_devices_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(acl_library().parents[1]))
    monkeypatch.setenv("XLLM_ACL_EMULATOR_DEVICES", "4")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "2,3")
    assert run_child("acl_emulation.child_opens", "1").stdout == f"acl {PAGE}\n"
    message = run_child("acl_emulation.child_opens", "2").stdout
    assert "npu:2 is not there" in message and "2 device(s)" in message and "is 2,3" in message


def test_a_release_without_the_granularity_call_has_the_usual_page(monkeypatch: pytest.MonkeyPatch) -> None:
    home = build_emulator("7.0")
    assert not hasattr(ctypes.CDLL(str(home / "lib64" / "libascendcl.so")), "aclrtMemGetAllocationGranularity")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    child = run_child("acl_emulation.child_opens")
    assert child.stdout == f"acl {PAGE}\n", child.stderr


@pytest.mark.parametrize("page_bytes", [0, 4096, 3 << 20])
def test_pages_are_multiples_of_the_vendors(emulator: Emulator, page_bytes: int) -> None:
    with pytest.raises(ValueError, match="positive multiple of 2097152"):
        open_kind("acl", page_bytes=page_bytes)


def test_pages_of_several_units(emulator: Emulator) -> None:
    driver = open_kind("acl", pages=10, page_bytes=2 * PAGE)
    start = driver.reserve(4 * 2 * PAGE)
    driver.map([(start + 4 * PAGE, driver.create(1)[0])])
    poke(start + 6 * PAGE - 3, b"end")
    assert driver.info().page_bytes == driver.memfd_bytes() == 2 * PAGE and driver.info().free == 8 * PAGE
    driver.close()
