"""A simulated accelerator under a real engine: the cpu computes, and a script says what computing would need.

Owns the device object; what it does to memory is xllm_cli.vmm.simulated's. `spikes` are the bytes each forward pass
takes and gives back, the last one for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from checkpoints import tiny_checkpoint

from xllm_cli import LLM
from xllm_cli.engine import start
from xllm_cli.flags import Config
from xllm_cli.vmm.driver import Driver, FaultyDriver, open_driver
from xllm_cli.vmm.simulated import SimulatedAllocator, SimulatedDriver
from xllm_cli.worker.cpu_device import CpuDevice
from xllm_cli.worker.kv_store import KvStore
from xllm_cli.worker.memory import DeviceMemoryObserver

MIB = 1 << 20
PAGE = 64 << 10
BLOCK_BYTES = 16 * 768  # tiny llama: 3 layers, k and v, 2 heads of 16, float32
FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "enable_vmm_kvcache": True,
    "vmm_elastic": True,
    "phy_page_granularity_size": PAGE,
}


class Accelerator:
    """`driver` for the engine, `allocator` for its steps, and the numbers of what happened."""

    def __init__(self, total: int, *, statistics: bool = True, faulty: bool = False) -> None:
        self.host = open_driver("cpu", mode="4k", page_bytes=PAGE)
        self.device = SimulatedDriver(self.host, total_bytes=total)
        self.driver: Driver = FaultyDriver(self.device) if faulty else self.device
        self.allocator = SimulatedAllocator(self.device, segment_bytes=PAGE)
        self.has_statistics = statistics
        self.kept = 0  # bytes the next forward pass allocates for good
        self.num_forwards = 0
        self._spikes: Iterator[int] = iter(())
        self._spike = 0

    def script(self, spikes: Iterable[int]) -> None:
        """From the next forward pass on."""
        self._spikes = iter(spikes)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """What a forward pass does to the device's memory."""
        self.num_forwards += 1
        self._spike = next(self._spikes, self._spike)
        kept, self.kept = self.kept, 0
        self.allocator.allocate(kept)
        with spike(self.allocator, self._spike):
            yield

    def serve(self, patch: pytest.MonkeyPatch, **flags: Any) -> LLM:
        """An engine on this accelerator."""
        patch.setattr(start, "open_device", lambda name, config: _SimulatedDevice(config, self))
        return LLM(tiny_checkpoint("llama"), driver=self.driver, **{**FLAGS, **flags})


@contextmanager
def spike(allocator: SimulatedAllocator, nbytes: int) -> Iterator[None]:
    """What a step needs while it runs."""
    allocator.allocate(nbytes)
    try:
        yield
    finally:
        allocator.free(nbytes)


class _SimulatedDevice(CpuDevice):
    meeting_name = "simulated"
    is_host = False

    def __init__(self, config: Config, accelerator: Accelerator) -> None:
        super().__init__(config)
        self._accelerator = accelerator

    def open_observer(self, driver: Driver, store: KvStore) -> DeviceMemoryObserver:  # type: ignore[override]
        statistics = self._accelerator.allocator if self._accelerator.has_statistics else None
        return DeviceMemoryObserver(driver, store, statistics)

    def guard(self) -> AbstractContextManager[None]:
        return self._accelerator.forward()
