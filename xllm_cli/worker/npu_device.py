"""An Ascend NPU as a device: torch_npu beside the acl driver, and its errors in words.

The only place that imports torch_npu. Which physical device it is follows from ASCEND_RT_VISIBLE_DEVICES, which the
vendor's runtime reads, and from the rank: rank r has the r-th visible one.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from typing import Any, cast

import torch

from xllm_cli.errors import DeviceError, MemoryShortage
from xllm_cli.flags import Config
from xllm_cli.models.ops import open_ops
from xllm_cli.models.ops.base import Ops, Put, WeightMemory
from xllm_cli.vmm.driver import Driver, open_driver
from xllm_cli.worker.backup import Backup, FileBackup, PinnedBackup
from xllm_cli.worker.graphs import GraphRuntime
from xllm_cli.worker.kv_store import KvStore
from xllm_cli.worker.memory import DeviceMemoryObserver
from xllm_cli.worker.npu_copies import MEANINGS, AclCopies
from xllm_cli.worker.npu_memory import NpuStatistics
from xllm_cli.worker.staging import Staging

log = logging.getLogger(__name__)

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
UNPINNED_SHARE = 0.05  # of the host's memory, left for others: pinned pages cannot be swapped
LARGEST_RANGE = 128 << 30  # of one reservation: the limit of the vendor's kernel driver up to CANN 9
KDL_EXT_DEV = 12  # DLPack's code for a device that an extension brought to torch

_CODE = re.compile(r"\b(?:error code is |ret(?:code)?[=: ]+|code[=: ]+)(\d{6})\b", re.IGNORECASE)


class NpuDevice:
    """See worker.device.Device."""

    name = "npu"
    prefill_tokens = 2048  # enough rows to keep the matrix units busy, short enough for running requests
    pads_rows = True
    largest_range: int | None = LARGEST_RANGE
    is_host = False

    def __init__(self, config: Config) -> None:
        """DeviceError if the environment makes no sense; nothing is opened yet."""
        self.index = config.distributed.node_rank or 0
        self.meeting_name = f"npu-{physical_index(visible_devices(os.environ.get(VISIBLE)), self.index)}"
        self.dlpack = (KDL_EXT_DEV, self.index)
        self._page_bytes = config.kv_cache.phy_page_granularity_size
        self._unclosed: list[Staging] = []

    @cached_property
    def _npu(self) -> Any:
        """torch.npu, this device set."""
        return open_npu(self.index)

    @cached_property
    def _copies(self) -> AclCopies:
        assert self._npu is not None
        return AclCopies(self.index)

    def open_driver(self) -> Driver:
        """See Device: first, since it tells best what is missing."""
        return open_driver(self.name, page_bytes=self._page_bytes, device_index=self.index)

    def open_ops(self, memory: WeightMemory | None = None, put: Put | None = None) -> Ops:
        """See Device. DeviceError, in one sentence, without a usable torch_npu."""
        assert self._npu is not None
        return open_ops(self.name, device_index=self.index, memory=memory, put=put)

    @contextmanager
    def open_staging(self) -> Iterator[Staging | None]:
        """See Device."""
        self._unclosed = [left for left in self._unclosed if not left.close()]
        try:
            staging = Staging(self._copies, self._settle)
        except (MemoryShortage, DeviceError) as error:
            log.warning("weights are copied as they are read: %s", error)
            yield None
            return
        try:
            yield staging
        finally:
            if not staging.close():
                self._unclosed.append(staging)

    def _settle(self) -> None:
        """What uses memory of torch's allocator runs on the current stream: it has ended then."""
        with self.guard():
            self._npu.current_stream(self.index).synchronize()

    def backups(self) -> Sequence[Callable[[int], Backup]]:
        """See Device: pinned memory, which the device copies from by itself; a file without."""
        return [self._pinned, lambda nbytes: FileBackup(guard=self.guard)]

    def _pinned(self, nbytes: int) -> Backup:
        with closing(open_driver("cpu", mode="4k")) as host:
            free = host.info().free - round(UNPINNED_SHARE * host.info().total)
        return PinnedBackup(self._copies, nbytes, free=free, fence=self.fence)

    def open_observer(self, driver: Driver, store: KvStore) -> DeviceMemoryObserver:
        """See Device."""
        return DeviceMemoryObserver(driver, store, NpuStatistics(self.index))

    def open_range(self, nbytes: int) -> NpuRange:
        """See Device: memory of torch's allocator, taken at once. MemoryShortage without."""
        assert self._npu is not None
        try:
            return NpuRange(torch.empty(nbytes, dtype=torch.uint8, device=torch.device(self.name, self.index)))
        except torch.OutOfMemoryError as error:
            raise MemoryShortage(
                f"the device has no {nbytes} bytes in one piece for a KV tensor: {first_line(error)}. "
                "Lower --max_memory_utilization, or set --max_cache_size"
            ) from error

    def open_graphs(self) -> GraphRuntime:
        """See Device."""
        return cast(GraphRuntime, self._npu)

    def fence(self) -> None:
        """See Device. Waits for every stream, torch_npu's queue of launches included: the driver's unmap does not."""
        with self.guard():
            self._npu.synchronize(self.index)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """See Device."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise DeviceError(f"npu {self.index}: {explain(error)}") from error


class NpuRange:
    """Memory of torch's allocator for one physical KV tensor; see kv_store.TensorRange."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory: torch.Tensor | None = memory

    def tensor(
        self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0
    ) -> torch.Tensor:
        """See TensorRange."""
        assert self._memory is not None, "the range is closed"
        whole = self._memory.view(dtype)
        steps = torch.empty(shape, device="meta").stride() if strides is None else strides
        return torch.as_strided(whole, shape, steps, offset // dtype.itemsize)

    def close(self) -> bool:
        """See TensorRange. The last view frees the memory: it is torch's own, nothing can be pulled from under it."""
        self._memory = None
        return True


def visible_devices(value: str | None) -> list[int] | None:
    """The physical devices of ASCEND_RT_VISIBLE_DEVICES, or None: all. DeviceError names a value that cannot be."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        hint = "it hides every device" if not value.strip() else "the vendor's runtime stops reading at what it refuses"
        raise DeviceError(
            f"{VISIBLE}={value!r} must be device numbers from `npu-smi info`, each once, separated by commas; {hint}"
        )
    return [int(part) for part in parts]


def physical_index(visible: list[int] | None, index: int) -> int:
    """Which physical device the `index`-th visible one is. DeviceError if there are fewer."""
    if visible is None:
        return index
    if index >= len(visible):
        raise DeviceError(
            f"--node_rank={index} needs {index + 1} visible devices and {VISIBLE}={','.join(map(str, visible))} has "
            f"{len(visible)}"
        )
    return visible[index]


def open_npu(index: int) -> Any:
    """torch.npu with device `index` set for this process. DeviceError in one sentence if that cannot be."""
    try:
        importlib.import_module("torch_npu")
    except ModuleNotFoundError as error:
        raise DeviceError(
            f"--device=npu needs torch-npu of torch's version: pip install torch-npu=={_release()} ({error})"
        ) from error
    except Exception as error:  # torch_npu raises no kind of its own when CANN's environment is missing
        raise DeviceError(f"torch-npu cannot be loaded ({first_line(error)}); run: {SET_ENV}") from error
    npu: Any = torch.npu  # type: ignore[attr-defined]  # put there by torch_npu
    try:
        count = int(npu.device_count())
        if count == 0:
            raise DeviceError(
                f"no npu is visible: {VISIBLE}={os.environ.get(VISIBLE, '(unset)')}, device nodes: {_nodes()}; "
                f"`npu-smi info` lists what the driver sees, containers need /dev/davinci* and /dev/davinci_manager"
            )
        if index >= count:
            raise DeviceError(f"--node_rank={index} needs {index + 1} visible devices, there are {count}")
        npu.set_device(index)
    except RuntimeError as error:
        raise DeviceError(f"npu {index} cannot be opened: {explain(error)}") from error
    return npu


def explain(error: BaseException) -> str:
    """An error of torch_npu in one sentence: its first line, its code and what that means."""
    text = str(error)
    code = next((int(found) for found in _CODE.findall(text)), None)
    meaning = MEANINGS.get(code, "") if code is not None else ""
    known = f" (code {code}{': ' if meaning else ''}{meaning})" if code is not None else ""
    return f"{first_line(error)}{known}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _release() -> str:
    return torch.__version__.partition("+")[0]


def _nodes() -> str:
    nodes = sorted(name for name in os.listdir("/dev") if name.startswith(("davinci", "devmm_svm", "hisi_hdc")))
    return ", ".join(nodes) or "none"
