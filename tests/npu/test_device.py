"""torch_npu for real on an emulated device: tensors over pages, what its allocator says, and its errors."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from ascendcl import Emulator

from xllm_cli.errors import DeviceError, MemoryShortage
from xllm_cli.flags import Config
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.driver import Driver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.worker.kv_store import VirtualKvStore
from xllm_cli.worker.memory import DeviceMemoryObserver
from xllm_cli.worker.npu_device import VISIBLE, NpuDevice, open_npu
from xllm_cli.worker.npu_memory import NpuStatistics

BASE_FORMAT = "ignore:Cannot create tensor with internal format:UserWarning"  # said once by whatever comes first
pytestmark = [pytest.mark.npu, pytest.mark.filterwarnings(BASE_FORMAT)]
MIB = 1 << 20
PAGE = 2 * MIB
NPU = "npu:0"


@pytest.fixture(scope="module")
def device() -> NpuDevice:
    """The one emulated device, opened as a server opens it: first the driver, then torch."""
    made = NpuDevice(Config())
    made.open_driver().close()
    open_npu(0)
    return made


@pytest.fixture
def driver(device: NpuDevice) -> Iterator[Driver]:
    opened = device.open_driver()
    yield opened
    usage = opened.usage()
    opened.close()
    assert (usage["ranges"], usage["handles"]) == (0, 0)


@pytest.fixture
def arena(device: NpuDevice, driver: Driver) -> Iterator[Arena]:
    """64 GiB of addresses for one tensor, a few pages of them used."""
    pool = PagePool(driver, page_bytes=PAGE)
    made = Arena(driver, pool, 64 << 30, device.dlpack)
    made.pool = pool
    yield made
    handles, stuck = made.unmap([page for page in range(made.num_pages) if made.is_mapped(page)])
    pool.give(handles)
    assert not stuck and made.close()
    pool.close()


def put(arena: Arena, *pages: int) -> None:
    arena.map(pages, arena.pool.take(len(pages)))


def filled(value: float, count: int) -> torch.Tensor:
    return torch.full((count,), value)


def test_the_device_is_the_one_torch_knows(device: NpuDevice, driver: Driver) -> None:
    free, total = torch.npu.mem_get_info(0)
    assert torch.npu.is_available() and torch.npu.current_device() == 0
    info = driver.info()
    assert (info.total, info.page_bytes) == (total, PAGE) and abs(info.free - free) <= 64 * MIB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.uint8])
def test_a_view_of_a_range_is_an_npu_tensor(arena: Arena, dtype: torch.dtype) -> None:
    put(arena, 5)
    view = arena.tensor(dtype, (PAGE // dtype.itemsize,), offset=5 * PAGE)
    assert (str(view.device), view.dtype, arena.num_views) == (NPU, dtype, 1)
    data = torch.arange(view.numel()).to(dtype)
    view.copy_(data)
    assert torch.equal(view.cpu(), data)


def test_strides_and_slices_reach_what_they_name(arena: Arena) -> None:
    put(arena, 0)
    view = arena.tensor(torch.float32, (4, 3, 8), (3 * 8, 8, 1))
    view.copy_(torch.arange(96.0).view(4, 3, 8))
    assert torch.equal(view[2, 1:].cpu(), torch.arange(96.0).view(4, 3, 8)[2, 1:])
    assert arena.num_views == 1  # a slice is the same storage


def test_a_view_costs_torch_no_memory_and_counts_until_it_dies(arena: Arena) -> None:
    before = torch.npu.memory_allocated(0), torch.npu.memory_reserved(0)
    whole = arena.tensor(torch.uint8, (arena.nbytes,))
    assert (torch.npu.memory_allocated(0), torch.npu.memory_reserved(0)) == before
    assert whole.numel() == 64 << 30 and not arena.close()
    del whole
    assert arena.num_views == 0


def test_a_live_tensor_sees_the_pages_that_are_mapped_under_it(device: NpuDevice, arena: Arena) -> None:
    put(arena, 0, 1)
    view = arena.tensor(torch.float32, (2, PAGE // 4))
    view.copy_(torch.stack([filled(1, PAGE // 4), filled(2, PAGE // 4)]))
    device.fence()
    (first, second), _ = arena.unmap([0, 1])
    arena.map([0, 1], [second, first])
    assert [float(row[17]) for row in view.cpu()] == [2, 1]
    arena.unmap([0])
    arena.map([7], [second])
    assert float(arena.tensor(torch.float32, (1,), offset=7 * PAGE).cpu()) == 2


def test_the_fence_waits_for_what_is_queued(device: NpuDevice, arena: Arena) -> None:
    emulator = Emulator()
    emulator.script("streams lazy")
    put(arena, 0)
    view = arena.tensor(torch.float32, (PAGE // 4,))
    view.copy_(torch.empty(PAGE // 4, pin_memory=True).fill_(3), non_blocking=True)
    deadline = time.monotonic() + 20
    while not emulator.report()["live"]["pending"] and time.monotonic() < deadline:
        time.sleep(0.01)  # torch_npu hands work over from a thread of its own
    assert emulator.report()["live"]["pending"] > 0
    device.fence()
    assert emulator.report()["live"]["pending"] == 0
    emulator.script("streams immediate")
    assert float(view.cpu()[-1]) == 3


# --- memory


def test_statistics_are_those_of_tensors_not_of_pages(device: NpuDevice, arena: Arena) -> None:
    statistics = NpuStatistics(0)
    statistics.empty_cache()
    before, free = statistics.allocated(), torch.npu.mem_get_info(0)[0]
    put(arena, 0, 1, 2)
    assert statistics.allocated() == before and torch.npu.mem_get_info(0)[0] == free - 3 * PAGE
    statistics.reset_peak()
    kept = torch.empty(24 * MIB, dtype=torch.uint8, device=NPU)
    del kept
    assert statistics.allocated() == before
    assert before + 24 * MIB <= statistics.peak_allocated() < before + 25 * MIB  # padded for vector units
    assert statistics.reserved() >= before + 24 * MIB
    statistics.empty_cache()
    assert statistics.reserved() < before + 24 * MIB


def test_memory_that_tensors_leave_can_be_had_by_pages(device: NpuDevice, driver: Driver) -> None:
    pool = PagePool(driver, page_bytes=PAGE)
    observer = device.open_observer(driver, VirtualKvStore([], pool, PAGE, fence=device.fence))
    assert isinstance(observer, DeviceMemoryObserver)
    outside = torch.empty(512 * MIB, dtype=torch.uint8, device=NPU)
    observer.begin_step()
    busy = torch.empty(100 * MIB, dtype=torch.uint8, device=NPU)
    del busy
    with_both = observer.observe()
    del outside
    assert with_both.execution_peak >= 100 * MIB and observer.observe().free == with_both.free
    freed = observer.relieve()
    after = observer.observe()
    assert freed >= 512 * MIB and after.free >= with_both.free + 512 * MIB
    assert after.execution_room + after.reserved >= 100 * MIB + after.tensors


def test_a_physical_range_is_torchs_own_memory_or_a_shortage(device: NpuDevice) -> None:
    room = device.open_range(4 * MIB)
    view = room.tensor(torch.float32, (2, 8), (8, 1))
    view.copy_(torch.ones(2, 8))
    assert str(view.device) == NPU and float(view.cpu().sum()) == 16
    assert room.close()
    with pytest.raises(MemoryShortage, match="max_cache_size"):
        device.open_range(torch.npu.mem_get_info(0)[1] * 2)


# --- errors


def test_an_operator_nobody_provides_is_an_error_in_words(device: NpuDevice) -> None:
    with pytest.raises(DeviceError, match="npu 0: ") as caught, device.guard():
        torch.ones(4, device=NPU).matmul(torch.ones(4, device=NPU))
        torch.npu.synchronize(0)  # a thread of torch_npu's launches it: there it fails, now or a moment later
    assert "\n" not in str(caught.value)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`code` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


OPEN = """
from xllm_cli.errors import DeviceError
from xllm_cli.flags import Config
from xllm_cli.worker.device import open_device
try:
    device = open_device("npu", Config())
    device.open_driver()
    device.open_ops()
except DeviceError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({VISIBLE: "7"}, "no npu can be used"),
        ({"LD_LIBRARY_PATH": "", "ASCEND_HOME_PATH": ""}, "libascendcl.so: cannot open shared object file"),
    ],
)
def test_without_a_device_one_sentence_says_what_to_do(environment: dict[str, str], text: str) -> None:
    result = run(OPEN, **environment)
    assert result.returncode == 0, result.stderr
    assert text in result.stdout and result.stdout.count("\n") == 1


EXPANDABLE = """
import torch
from xllm_cli.flags import Config
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.pool import PagePool
from xllm_cli.worker.device import open_device
from xllm_cli.worker.npu_memory import NpuStatistics

MIB, PAGE = 1 << 20, 2 << 20
device = open_device("npu", Config())
driver = device.open_driver()
device.open_range(MIB).close()
statistics, pool = NpuStatistics(0), PagePool(driver, page_bytes=PAGE)
arena = Arena(driver, pool, 64 << 30, device.dlpack)
statistics.empty_cache()
free = driver.info().free
outside = torch.empty(200 * MIB, dtype=torch.uint8, device="npu:0")
arena.map([0, 1], pool.take(2))
view = arena.tensor(torch.float32, (PAGE // 2,))
view.copy_(torch.ones(PAGE // 2))
assert driver.info().free <= free - 204 * MIB, "the allocator's segment and the pages are both of the device"
del outside
statistics.empty_cache()
assert statistics.reserved() < 200 * MIB and driver.info().free >= free - 8 * MIB
assert float(view.cpu().sum()) == PAGE // 2, "emptying the cache took no page of ours"
del view
device.fence()
pool.give(arena.unmap([0, 1])[0])
assert arena.close()
pool.close()
driver.close()
"""


@pytest.mark.parametrize("setting", ["expandable_segments:True", "expandable_segments:False"])
def test_expandable_segments_and_our_pages_share_a_device(setting: str) -> None:
    result = run(EXPANDABLE, PYTORCH_NPU_ALLOC_CONF=setting)
    assert result.returncode == 0, result.stderr
