"""What a start needs of a device, in one object a device: its memory, its operators, and who watches them.

Chosen by name and imported only then, so that no device's libraries are needed for another's. Knows no model, no cache
policy and no requests.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, cast

from xllm_cli.errors import DeviceError
from xllm_cli.flags import Config
from xllm_cli.models.ops.base import Ops, Put, WeightMemory
from xllm_cli.vmm.driver import Driver
from xllm_cli.worker.backup import Backup
from xllm_cli.worker.graphs import GraphRuntime
from xllm_cli.worker.kv_store import KvStore, TensorRange
from xllm_cli.worker.memory import MemoryObserver
from xllm_cli.worker.staging import Staging

_CLASSES = {
    "cpu": ("xllm_cli.worker.cpu_device", "CpuDevice"),
    "npu": ("xllm_cli.worker.npu_device", "NpuDevice"),
}


class Device(Protocol):
    """One device of this process.

    name               what --device calls it
    meeting_name       the folder, without its base, where all engines on the same physical device meet
    prefill_tokens     what a step prefills at most when no chunk is given
    pads_rows          rows may be padded with ones that write block 0, which then stays mapped
    largest_range      the most bytes that one tensor may reserve; None: no limit
    is_host            its memory is the machine's: what the system itself needs stays free (budget.HOST_FLOOR_BYTES)
    dlpack             DLPack's (type, number) of tensors in its memory
    """

    name: str
    meeting_name: str
    prefill_tokens: int
    pads_rows: bool
    largest_range: int | None
    is_host: bool
    dlpack: tuple[int, int]

    def open_driver(self) -> Driver:
        """The driver of its memory. DeviceError if it cannot be used, with what to do about it."""
        ...

    def open_ops(self, memory: WeightMemory | None = None, put: Put | None = None) -> Ops:
        """Its operators; `memory` is where they put weights, None the device's usual place, `put` what brings them
        there, None a plain copy."""
        ...

    def open_staging(self) -> AbstractContextManager[Staging | None]:
        """The manual loader: what brings weights into its memory, while the next are read. None where it copies
        nothing, because the checkpoint's bytes are packed straight into place, or cannot be had."""
        ...

    def backups(self) -> Sequence[Callable[[int], Backup]]:
        """The kinds of copy on the host that weights come back from, each for so many bytes, the best first."""
        ...

    def open_observer(self, driver: Driver, store: KvStore) -> MemoryObserver:
        """Who sees what steps need of its memory; from now on."""
        ...

    def open_range(self, nbytes: int) -> TensorRange:
        """Ordinary memory for a physical KV tensor."""
        ...

    def open_graphs(self) -> GraphRuntime | None:
        """What captures its work and replays it; None where nothing does."""
        ...

    def guard(self) -> AbstractContextManager[None]:
        """Around work on the device: its errors leave as a DeviceError that says what they mean. A shortage stays
        torch.OutOfMemoryError."""
        ...

    def fence(self) -> None:
        """Return when the device no longer works on anything handed to it: nothing is unmapped before."""
        ...


def open_device(name: str, config: Config) -> Device:
    """The device called `name` (never auto), as `config` describes it. DeviceError if there is none such."""
    if name not in _CLASSES:
        raise DeviceError(f"--device={name} is not supported yet; there are: {', '.join(_CLASSES)}")
    module, class_name = _CLASSES[name]
    open_one = getattr(importlib.import_module(module), class_name)
    return cast(Callable[[Config], Device], open_one)(config)
