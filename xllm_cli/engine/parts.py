"""The parts of an engine and how each is opened: the pool, weights, the cache's books, ranks with their stores.

Owns what each part is made of; host.py owns the order. Knows no requests and no device by name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

from xllm_cli.cache.budget import Limits, floor_bytes
from xllm_cli.cache.manager import CacheManager
from xllm_cli.cache.options import CacheOptions
from xllm_cli.core import CacheSpec
from xllm_cli.engine.sizes import CacheSize, cache_limits
from xllm_cli.engine.slices import SliceQueue
from xllm_cli.errors import MemoryShortage
from xllm_cli.flags import Config
from xllm_cli.loading import open_checkpoint
from xllm_cli.models.ops.base import WeightMemory
from xllm_cli.models.registry import Model, build_model, load_config
from xllm_cli.neighbours.folder import LOCK_NAME, device_folder
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.driver import Driver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.vmm.weights import WeightArena
from xllm_cli.worker.device import Device
from xllm_cli.worker.group import LocalGroup
from xllm_cli.worker.kv_store import KvStore, PhysicalKvStore, VirtualKvStore
from xllm_cli.worker.memory import MemoryObserver
from xllm_cli.worker.sharing import Loaded, WeightsShare
from xllm_cli.worker.staging import Staging
from xllm_cli.worker.weights import Weights
from xllm_cli.worker.worker import Worker

log = logging.getLogger("xllm.engine")

RESERVED_PER_BYTE = 4  # addresses for weights per byte of the checkpoint: types may widen, forms be padded
RESERVED_BESIDES = 1 << 30  # and for tables
SPARE_BYTES = 64 << 20  # emptied pages kept mapped for a second at most, in all; a page of every tensor if that is more

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Start:
    """What every phase of a start uses. What it opens is entered in `opened`, and closed again should a later fail.

    What takes long, as reading weights does, pauses in `slices` often: the loop may go on, and somebody wants to know
    that the engine lives. `pool` holds the pages of KV and weights, None where neither lives in pages. A model that
    joins others in it has their `limits`, `stamps` and `observer`, `room` for so many bytes of weights at most, and a
    `twin` if one of them comes from the same checkpoint: it shares its weights. `promised` are the bytes of their
    physical KV.
    """

    config: Config
    device: Device
    driver: Driver
    pool: PagePool | None
    progress: Progress
    opened: ExitStack
    slices: SliceQueue
    stamps: Iterator[int] = field(default_factory=lambda: count(1))
    limits: Limits | None = None
    observer: MemoryObserver | None = None
    twin: Loaded | None = None
    room: int | None = None
    promised: int = 0

    def beside(self, first: Limits, path: str, model_id: str, twin: Loaded | None, opened: ExitStack) -> Start:
        """The start of another model in the same pool, under the caps of the `first`."""
        model = self.config.model.model_copy(update={"model": path, "model_id": model_id})
        config = self.config.model_copy(update={"model": model})
        limits = replace(first, limit=None, own_limit=None)
        return replace(self, config=config, opened=opened, limits=limits, twin=twin)


class Rank(NamedTuple):
    """What a rank is made of."""

    model: Model
    weights: WeightsShare | None
    spec: CacheSpec
    size: CacheSize


def open_pool(config: Config, device: Device, driver: Driver, opened: ExitStack) -> PagePool | None:
    """It grows while weights are loaded; a fixed one is filled up when the cache's size is known."""
    if not config.has_pool:
        return None
    lock = meeting_place(config, device) / LOCK_NAME
    pool = PagePool(driver, page_bytes=driver.info().page_bytes, lock_path=lock)
    opened.callback(pool.close)
    return pool


def load_model(start: Start) -> tuple[Model, WeightsShare | None]:
    """The model, and its weights apart where they live in pages."""
    if start.pool is None or not start.config.vmm.enable_vmm_weights:
        return _read_model(start, None), None
    return load_weights(start, start.pool)


def load_weights(start: Start, pool: PagePool) -> Loaded:
    """The model in pages of its own, or of the twin's. Awake: WeightsError, MemoryShortage or ModelError if that cannot
    be."""
    if start.twin is not None:
        model, weights = start.twin.model, WeightsShare(start.twin.weights.weights)
        start.opened.callback(weights.close)
        if short := weights.wake(keep_free=lambda: _keep_free(start)):
            raise MemoryShortage(f"no memory for {weights.nbytes} bytes of weights: {short}")
        return Loaded(model, weights)
    device = start.device
    with closing(open_checkpoint(start.config.model.model)) as checkpoint:
        nbytes = RESERVED_PER_BYTE * checkpoint.num_bytes + RESERVED_BESIDES  # addresses; pages come as they are filled
    arena = WeightArena(
        start.driver,
        pool,
        _reserved(nbytes, device.largest_range, start.room),
        device=device.dlpack,
        fence=device.fence,
        keep_free=_keep_free(start),
        pause=start.slices.pause,
    )
    start.opened.callback(arena.close)
    model = _read_model(start, arena)
    start.progress("copying weights")
    made = Weights(arena, pool, reload=lambda memory: _read_again(start, memory), copies=device.backups())
    return Loaded(model, WeightsShare(made))


def _reserved(nbytes: int, *most: int | None) -> int:
    """As much as that, but no more than any of these."""
    least = min([nbytes, *(each for each in most if each is not None)])
    if least <= 0:
        raise MemoryShortage("what other models hold leaves no byte under --max_cache_size or --max_memory_utilization")
    return least


def _keep_free(start: Start) -> int:
    limits = Limits(arena_bytes=0, ratio=start.config.kv_ratio, host=start.device.is_host)
    return floor_bytes(start.driver.info().total, limits)


def _read_model(start: Start, memory: WeightMemory | None) -> Model:
    flags, memory = start.config.model, None if memory is None else _Pausing(memory, start.slices.pause)
    began, device = time.monotonic(), start.device
    manual: AbstractContextManager[Staging | None] = nullcontext()
    if start.config.implied_manual_loader:
        manual = device.open_staging()
    with closing(open_checkpoint(flags.model)) as checkpoint, manual as staging, _in_words(device):
        ops = device.open_ops(memory, None if staging is None else staging.put)
        model = build_model(load_config(flags.model), ops, checkpoint, flags.dtype)
        if staging is not None:
            staging.finish()
    log.info("weights read in %.2f s: %s", time.monotonic() - began, _how_loaded(start, model, staging))
    return model


@contextmanager
def _in_words(device: Device) -> Iterator[None]:
    """What ends a loading for the device's sake leaves as a MemoryShortage or DeviceError."""
    try:
        with device.guard():
            yield
    except torch.OutOfMemoryError as error:
        text = str(error).split("\n", maxsplit=1)[0]
        raise MemoryShortage(f"the device has no memory for the model: {text}") from error


def _how_loaded(start: Start, model: Model, staging: Staging | None) -> str:
    if staging is not None:
        return f"the manual loader copied {staging.nbytes} bytes, staged in {staging.pinned_bytes} of pinned memory"
    if not start.device.is_host:
        return f"{model.weight_bytes} bytes, each copied as it was read"
    return f"{model.weight_bytes} bytes, packed straight into place: the device's memory is the host's"


class _Pausing:
    """Memory for weights that pauses with every tensor."""

    def __init__(self, memory: WeightMemory, pause: Callable[[], None]) -> None:
        self._memory = memory
        self._pause = pause

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See models.ops.base.WeightMemory."""
        self._pause()
        return self._memory.take(shape, dtype)


def _read_again(start: Start, memory: WeightMemory) -> None:
    """Put the checkpoint's weights where those of the running model were; the model that this makes is not needed."""
    _read_model(start, memory)


def open_cache(start: Start, rank: Rank) -> CacheManager:
    """The books of its KV, and of the weights that share the device with it."""
    flags, page_bytes = start.config.kv_cache, start.driver.info().page_bytes
    in_pages = 0 if rank.weights is None else rank.weights.nbytes
    limits = start.limits if start.config.vmm.enable_vmm_kvcache else None
    cache = CacheManager(
        rank.spec,
        limits=limits or cache_limits(start.config, rank.size, is_host=start.device.is_host, weights=in_pages),
        page_bytes=page_bytes if start.config.vmm.enable_vmm_kvcache else None,
        prefix_seed=flags.xxh3_128bits_seed if flags.enable_prefix_cache else None,
        num_blocks=rank.size.num_blocks,
        spare_pages=-(-SPARE_BYTES // page_bytes),
        options=CacheOptions(padding=start.device.pads_rows, stamps=start.stamps),
    )
    cache.set_weights(mapped=in_pages, on_device=in_pages or rank.model.weight_bytes)
    return cache


def open_group(start: Start, rank: Rank) -> LocalGroup:
    """The ranks, each with its store and observer."""
    store = _open_store(start, rank.spec, rank.size)
    observer = start.observer
    if observer is None:
        observer = start.opened.enter_context(closing(start.device.open_observer(start.driver, store)))
    worker = Worker(
        rank.model,
        store,
        observer,
        block_size=rank.spec.block_size,
        num_blocks=rank.size.num_blocks,
        guard=start.device.guard,
        weights=rank.weights,
    )
    group = LocalGroup(worker)
    if start.pool is not None:
        start.pool.share()  # the store closes it
    start.opened.callback(group.close)
    return group


def _open_store(start: Start, spec: CacheSpec, size: CacheSize) -> KvStore:
    device, opened, pool = start.device, start.opened, start.pool
    sizes = [tensor.bytes_per_block * size.num_blocks for tensor in spec.tensors]
    if pool is None or not start.config.vmm.enable_vmm_kvcache:
        ranges = [opened.enter_context(closing(device.open_range(nbytes))) for nbytes in sizes]
        return PhysicalKvStore(ranges, pool)
    if size.pool_pages is not None:
        pool.fix(size.pool_pages, lambda done, total: start.progress(f"creating pages: {done} of {total}"))
    arenas = [opened.enter_context(closing(Arena(start.driver, pool, nbytes, device.dlpack))) for nbytes in sizes]
    widths = [tensor.bytes_per_block for tensor in spec.tensors]
    return VirtualKvStore(arenas, pool, pool.page_bytes, fence=device.fence, block_bytes=widths)


def meeting_place(config: Config, device: Device) -> Path:
    """The folder where all engines of this user on the same physical device meet."""
    return device_folder(device.meeting_name, config.vmm.vmm_neighbours_dir)
