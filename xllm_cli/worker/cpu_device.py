"""The cpu as a device: host memory, kernels that have ended when their call returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from xllm_cli.flags import Config
from xllm_cli.models.ops import open_ops
from xllm_cli.models.ops.base import Ops, Put, WeightMemory
from xllm_cli.vmm.arena import HOST, AnonymousRange
from xllm_cli.vmm.driver import Driver, open_driver
from xllm_cli.worker.backup import Backup, FileBackup
from xllm_cli.worker.kv_store import KvStore
from xllm_cli.worker.memory import HostMemoryObserver


class CpuDevice:
    """See worker.device.Device."""

    name = "cpu"
    meeting_name = "cpu"
    prefill_tokens = 512  # longer steps gain nothing and make everybody else wait
    pads_rows = False
    largest_range: int | None = None
    is_host = True
    dlpack = HOST

    def __init__(self, config: Config) -> None:
        self._host = config.host
        self._page_bytes = config.kv_cache.phy_page_granularity_size

    def open_driver(self) -> Driver:
        """See Device."""
        return open_driver(
            self.name,
            mode=self._host.host_page_mode,
            page_bytes=self._page_bytes,
            total_bytes=self._host.host_memory_bytes or None,
        )

    def open_ops(self, memory: WeightMemory | None = None, put: Put | None = None) -> Ops:
        """See Device."""
        assert put is None, "operators of the cpu pack what they read where it stays"
        return open_ops(self.name, memory=memory)

    def open_staging(self) -> AbstractContextManager[None]:
        """See Device: its memory is the host's."""
        return nullcontext()

    def backups(self) -> Sequence[Callable[[int], Backup]]:
        """See Device: in memory a copy would save nothing."""
        return [lambda nbytes: FileBackup()]

    def open_observer(self, driver: Driver, store: KvStore) -> HostMemoryObserver:
        """See Device."""
        return HostMemoryObserver(driver, store)

    def open_range(self, nbytes: int) -> AnonymousRange:
        """See Device: backed as it is touched."""
        return AnonymousRange(nbytes)

    def open_graphs(self) -> None:
        """See Device: a kernel's call costs next to nothing here."""

    def guard(self) -> AbstractContextManager[None]:
        """See Device: its errors need no translation."""
        return nullcontext()

    def fence(self) -> None:
        """See Device: there is no work in flight to wait for."""
