"""The manual loader and pinned memory on the emulated Ascend runtime: what arrives, what is waited for, what fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from acl_emulation import DRIVER_FAILED, OUT_OF_MEMORY, clean_emulator
from ascendcl import Emulator
from driver_kinds import acl_library, open_kind

from xllm_cli.errors import DeviceError, MemoryShortage
from xllm_cli.vmm.driver import Driver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.vmm.weights import WeightArena
from xllm_cli.worker import npu_copies
from xllm_cli.worker.npu_copies import AclCopies
from xllm_cli.worker.staging import Staging

BUFFER = 8 << 10
FUNCTIONS = (
    "aclrtSetDevice",
    "aclrtMallocHost",
    "aclrtCreateStream",
    "aclrtMemcpyAsync",
    "aclrtSynchronizeStreamWithTimeout",
    "aclrtDestroyStream",
    "aclrtFreeHost",
)
SOURCES = [
    torch.arange(3),
    torch.randn(40, 100),  # two buffers of it
    torch.randn(17, 30).bfloat16(),
    torch.zeros(0),
    torch.randn(5, 3).T,
    torch.tensor(4.5),
    torch.randn(3 * BUFFER // 2).bfloat16(),
]


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with clean_emulator() as emulator:
        open_kind("acl").close()  # the device has a stream of its own from then on
        streams = emulator.report()["live"]["streams"]
        yield emulator
        emulator.script("streams immediate")
        assert not emulator.leaks().get("host_blocks") and emulator.report()["live"]["streams"] == streams


class Device:
    """Memory of the emulated device, which its tensors here name by their addresses."""

    def __init__(self) -> None:
        self.driver: Driver = open_kind("acl")
        self.pool = PagePool(self.driver, page_bytes=self.driver.info().page_bytes)
        self.arena = WeightArena(self.driver, self.pool, 1 << 20)
        self.copies = AclCopies(0, str(acl_library()))

    def take(self, source: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.arena.take(source.shape, dtype or source.dtype).fill_(-1)

    def staging(self, **options: int) -> Staging:
        return Staging(self.copies, lambda: None, **{"buffer_bytes": BUFFER, **options})

    def load(self, staging: Staging) -> list[torch.Tensor]:
        """All SOURCES, one after the other."""
        taken = [self.take(source) for source in SOURCES]
        for to, source in zip(taken, SOURCES, strict=True):
            staging.put(to, source)
        staging.finish()
        return taken


@pytest.fixture
def device(emulator: Emulator) -> Iterator[Device]:
    made = Device()
    yield made
    assert made.arena.close()
    made.pool.close()
    made.driver.close()


def test_tensors_of_every_form_arrive_once_all_is_finished(device: Device, emulator: Emulator) -> None:
    emulator.script("streams lazy")
    staging = device.staging()
    to = device.take(SOURCES[0])
    staging.put(to, SOURCES[0])
    assert bool((to == -1).all()), "nobody has waited for it"
    assert all(map(torch.equal, device.load(staging), SOURCES)) and torch.equal(to, SOURCES[0])
    assert staging.nbytes == sum(source.nbytes for source in [SOURCES[0], *SOURCES])
    assert staging.close() and staging.close()


def test_a_type_is_widened_on_the_way(device: Device) -> None:
    source, staging = torch.randn(50, 70).bfloat16(), device.staging()
    wide = device.take(source, torch.float32)
    staging.put(wide, source)
    staging.finish()
    assert torch.equal(wide, source.float())
    assert staging.close()


def test_two_buffers_are_all_the_host_gives_and_one_is_filled_while_the_other_is_copied(
    device: Device, emulator: Emulator
) -> None:
    staging = device.staging()
    emulator.reset()
    device.load(staging)
    blocks = emulator.leaks()["host_blocks"]
    assert [block["bytes"] for block in blocks] == [BUFFER, BUFFER] and staging.pinned_bytes == 2 * BUFFER
    buffers = -(-staging.nbytes // BUFFER)
    waits = emulator.calls("aclrtSynchronizeStreamWithTimeout")
    assert buffers <= waits <= buffers + 2, "each buffer once, when it is wanted again or at the end"
    assert staging.close()


def test_the_second_buffer_is_on_its_way_before_the_first_is_waited_for(device: Device, emulator: Emulator) -> None:
    staging, source = device.staging(), torch.randn(3 * BUFFER // 4)
    to = device.take(source)
    with emulator.tracing() as calls:
        staging.put(to, source)
    names = [call["call"] for call in calls if call["call"] != "aclrtSetDevice"]
    assert names == ["aclrtMemcpyAsync"] * 2 + ["aclrtSynchronizeStreamWithTimeout", "aclrtMemcpyAsync"]
    first, second, third = (call["arguments"][-1] for call in calls if call["call"] == "aclrtMemcpyAsync")
    assert first == third != second, "each buffer has its stream"
    staging.finish()
    assert torch.equal(to, source) and staging.close()


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, DRIVER_FAILED])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_whatever_call_fails_nothing_is_left_and_the_next_loading_is_whole(
    device: Device, emulator: Emulator, function: str, code: int
) -> None:
    emulator.reset()
    assert attempt(device) == ""
    calls = emulator.calls(function)
    assert calls >= 2
    for nth in {1, 2, calls // 2, calls - 1, calls}:
        emulator.reset()
        emulator.inject(function, code, nth=nth)
        attempt(device)
        assert emulator.counters()[function].injected == 1 and not emulator.leaks().get("host_blocks")
    emulator.reset()
    assert attempt(device) == ""


def attempt(device: Device) -> str:
    """Load all; "" if it went well, else what was said. What does not close at once closes then."""
    try:
        staging = device.staging()
    except (DeviceError, MemoryShortage) as error:
        return str(error)
    said = ""
    try:
        assert all(map(torch.equal, device.load(staging), SOURCES))
    except DeviceError as error:
        said = str(error)
    assert staging.close() or staging.close()
    return said


def test_a_copy_that_does_not_end_is_given_up_and_its_memory_kept(
    device: Device, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npu_copies, "WAIT_SECONDS", 0.01)
    staging, source = device.staging(), torch.randn(10)
    to = device.take(source)
    emulator.delay("task", 0.5)
    staging.put(to, source)
    with pytest.raises(DeviceError, match="aclrtSynchronizeStreamWithTimeout"):
        staging.finish()
    assert not staging.close() and emulator.leaks()["host_blocks"], "the device may read it still"
    emulator.delay("task", 0)
    monkeypatch.setattr(npu_copies, "WAIT_SECONDS", 10)
    assert staging.close() and torch.equal(to, source)


def test_an_error_names_the_call_its_text_and_its_code(device: Device, emulator: Emulator) -> None:
    emulator.inject("aclrtCreateStream", DRIVER_FAILED)
    with pytest.raises(DeviceError, match=r"^npu 0: aclrtCreateStream: .* injected by the script \(code 507899\)$"):
        device.staging()
    emulator.inject("aclrtMallocHost", OUT_OF_MEMORY)
    with pytest.raises(MemoryShortage, match=rf"no {BUFFER} bytes of pinned memory"):
        device.staging()


def test_without_the_library_it_is_named() -> None:
    with pytest.raises(DeviceError, match=r"libascendcl.so cannot be used for copies: .*nowhere"):
        AclCopies(0, "/nowhere/libascendcl.so")
