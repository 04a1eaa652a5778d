"""What can be said of an Ascend device without one: the environment, and errors in words. tests/npu/ has the rest."""

from __future__ import annotations

import sys

import pytest

from xllm_cli.config import make_config
from xllm_cli.errors import DeviceError
from xllm_cli.flags import Config
from xllm_cli.worker.device import open_device
from xllm_cli.worker.npu_device import VISIBLE, NpuDevice, explain, open_npu, physical_index, visible_devices

OUT_OF_MEMORY = """\
NPUPhysicalMalloc:/NPUCachingAllocator.cpp:301 NPU function error: aclrtMallocPhysical, error code is 207001
[ERROR] 2026-01-01-00:00:00 (PID:1, Device:0, RankID:-1) ERR00100 PTA call acl api failed
[Error]: Failed to allocate memory."""


@pytest.mark.parametrize(("value", "devices"), [(None, None), ("0", [0]), ("4,5, 6", [4, 5, 6]), ("7,0", [7, 0])])
def test_visible_devices_are_numbers(value: str | None, devices: list[int] | None) -> None:
    assert visible_devices(value) == devices


@pytest.mark.parametrize(
    ("value", "hint"), [("", "hides every device"), ("-1", "stops reading"), ("0,0", "once"), ("npu:1", "npu:1")]
)
def test_a_value_that_shows_no_device_is_named(value: str, hint: str) -> None:
    with pytest.raises(DeviceError, match=hint) as caught:
        visible_devices(value)
    assert f"{VISIBLE}={value!r}" in str(caught.value)


def test_a_rank_has_the_visible_device_of_its_number() -> None:
    assert [physical_index([4, 6], rank) for rank in (0, 1)] == [4, 6]
    assert physical_index(None, 3) == 3
    with pytest.raises(DeviceError, match=r"node_rank=2 needs 3 visible devices and .*=4,6 has 2"):
        physical_index([4, 6], 2)


def test_engines_meet_on_the_physical_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, name in (("5", "npu-5"), ("3,1", "npu-3")):
        monkeypatch.setenv(VISIBLE, visible)
        device = open_device("npu", Config())
        assert isinstance(device, NpuDevice) and (device.meeting_name, device.dlpack) == (name, (12, 0))


def test_the_first_line_and_the_code_tell_what_happened() -> None:
    text = explain(RuntimeError(OUT_OF_MEMORY))
    assert text.startswith("NPUPhysicalMalloc") and "\n" not in text
    assert text.endswith("(code 207001: the device has no memory left)")
    assert explain(RuntimeError("\n ACL failed, ret = 507015 \nmore")).startswith(
        "ACL failed, ret = 507015 (code 507015: a"
    )
    assert explain(ValueError()) == "ValueError"


def test_a_shortage_stays_one_and_other_errors_become_clear() -> None:
    torch = pytest.importorskip("torch")
    device = NpuDevice(make_config(device="auto"))
    with pytest.raises(torch.OutOfMemoryError), device.guard():
        raise torch.OutOfMemoryError("2 GiB")
    with pytest.raises(DeviceError, match=r"npu 0: kaput \(code 507899: the kernel driver refused"), device.guard():
        raise RuntimeError("kaput\nerror code is 507899")


def test_without_torch_npu_it_is_named_with_the_release_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(DeviceError, match=r"pip install torch-npu==\d+\.\d+\.\d+ "):
        open_npu(0)
