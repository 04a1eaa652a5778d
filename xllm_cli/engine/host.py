"""From a Config to a running engine: device, weights, cache, worker, in the order in which each can still say no.

Owns the start-up; knows no requests and no device by name. Every phase is named through `progress`, for the log and
for /health.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from xllm_cli.cache.manager import CacheManager
from xllm_cli.cache.options import CacheOptions
from xllm_cli.core import CacheSpec, Ready, Request, SamplingParams
from xllm_cli.engine.engine import Engine
from xllm_cli.engine.grammar import Grammars
from xllm_cli.engine.report import MemoryFacts, Reporter
from xllm_cli.engine.scheduler import Scheduler
from xllm_cli.engine.sizes import CacheSize, cache_limits, check_capacity, serving_limits, size_cache, step_limits
from xllm_cli.errors import DeviceError, MemoryShortage
from xllm_cli.facts import resolve_device
from xllm_cli.flags import Config
from xllm_cli.loading import open_checkpoint
from xllm_cli.models.registry import Model, build_model, load_config
from xllm_cli.neighbours.folder import LOCK_NAME, device_folder
from xllm_cli.neighbours.peers import Neighbours
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.driver import Driver, DriverInfo, VmmError, VmmShortage
from xllm_cli.vmm.pool import PagePool
from xllm_cli.worker.device import Device, open_device
from xllm_cli.worker.graphs import GraphOptions, graph_sizes
from xllm_cli.worker.group import LocalGroup
from xllm_cli.worker.kv_store import KvStore, PhysicalKvStore, VirtualKvStore
from xllm_cli.worker.worker import Worker

log = logging.getLogger("xllm.engine")

SPARE_BYTES = 64 << 20  # emptied pages kept mapped for a second at most, in all
WARM_UP_TOKENS = 64
WARM_UP_SECONDS = 20.0
WARM_UP_ID = "warm-up"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Start:
    """What every phase of a start uses. What it opens is entered in `opened`, and closed again should a later fail."""

    config: Config
    device: Device
    driver: Driver
    progress: Progress
    opened: ExitStack


def build_engine(config: Config, progress: Progress, driver: Driver | None = None) -> tuple[Engine, Ready]:
    """A warmed-up engine and what to tell clients of it. `driver` replaces the device's own (tests wrap it).

    Raises ModelError, DeviceError or MemoryShortage; nothing stays behind then.
    """
    with ExitStack() as opened:
        try:
            built = _build(config, progress, driver, opened)
        except VmmShortage as error:
            raise MemoryShortage(
                f"the device has no room for the KV cache: {error}. Lower --max_memory_utilization or --max_cache_size"
            ) from error
        except VmmError as error:
            raise DeviceError(f"the device failed while the KV cache was set up: {error}") from error
        opened.pop_all()  # the engine closes them from here on
        return built


def _build(config: Config, progress: Progress, driver: Driver | None, opened: ExitStack) -> tuple[Engine, Ready]:
    progress("reading the model's configuration")
    model_config = load_config(config.model.model)
    progress("opening the device")
    device = open_device(resolve_device(config.model.device), config)
    start = Start(config, device, driver or device.open_driver(), progress, opened)
    progress("loading weights")
    model = _load_model(start)
    progress("reserving the KV cache")
    spec = model.cache_spec(config.kv_cache.block_size)
    info = start.driver.info()
    size = size_cache(config, spec, info, device.largest_range, is_host=device.is_host)
    cache = _open_cache(start, spec, size)
    cache.set_weights(mapped=0, on_device=model.weight_bytes)
    group = _open_group(start, model, spec, size)
    cache.observe(group.observe())
    check_capacity(cache, model_config.max_positions)
    engine = Engine(
        Scheduler(cache, step_limits(config, device.prefill_tokens, model_config.vocab_size)),
        cache,
        group,
        limits=serving_limits(config, model_config.max_positions, model_config.vocab_size),
        reporter=Reporter(cache, _facts(start, info, size)),
        grammars=Grammars(config.model.model, vocab_size=model_config.vocab_size, end_ids=model_config.eos_token_ids),
    )
    progress("warming up")
    warm_up(engine, model_config.max_positions)
    _capture_graphs(start, group, model_config.max_positions)
    cache.observe(group.observe())
    return engine, Ready(
        model_id=config.served_model_id,
        architecture=model_config.architecture,
        dtype=model_config.resolve_dtype(config.model.dtype),
        max_model_len=model_config.max_positions,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        capacity_tokens=cache.possible_tokens(),
        snapshot=engine.snapshot(),
    )


def _load_model(start: Start) -> Model:
    flags = start.config.model
    with closing(open_checkpoint(flags.model)) as checkpoint:
        return build_model(load_config(flags.model), start.device.open_ops(), checkpoint, flags.dtype)


def _open_cache(start: Start, spec: CacheSpec, size: CacheSize) -> CacheManager:
    flags, page_bytes = start.config.kv_cache, start.driver.info().page_bytes
    return CacheManager(
        spec,
        limits=cache_limits(start.config, size, is_host=start.device.is_host),
        page_bytes=page_bytes if start.config.vmm.enable_vmm_kvcache else None,
        prefix_seed=flags.xxh3_128bits_seed if flags.enable_prefix_cache else None,
        num_blocks=size.num_blocks,
        spare_pages=SPARE_BYTES // page_bytes,
        options=CacheOptions(padding=start.device.pads_rows),
    )


def _open_group(start: Start, model: Model, spec: CacheSpec, size: CacheSize) -> LocalGroup:
    store = _open_store(start, spec, size)
    observer = start.opened.enter_context(closing(start.device.open_observer(start.driver, store)))
    guard = start.device.guard
    worker = Worker(model, store, observer, block_size=spec.block_size, num_blocks=size.num_blocks, guard=guard)
    group = LocalGroup(worker)
    start.opened.callback(group.close)
    return group


def _open_store(start: Start, spec: CacheSpec, size: CacheSize) -> KvStore:
    device, opened = start.device, start.opened
    sizes = [tensor.bytes_per_block * size.num_blocks for tensor in spec.tensors]
    if not start.config.vmm.enable_vmm_kvcache:
        return PhysicalKvStore([opened.enter_context(closing(device.open_range(nbytes))) for nbytes in sizes])
    page_bytes = start.driver.info().page_bytes
    pool = PagePool(
        start.driver,
        page_bytes=page_bytes,
        fixed_pages=size.pool_pages,
        lock_path=None if size.pool_pages is not None else meeting_place(start.config, device) / LOCK_NAME,
        progress=lambda done, total: start.progress(f"creating pages: {done} of {total}"),
    )
    opened.callback(pool.close)
    arenas = [opened.enter_context(closing(Arena(start.driver, pool, nbytes, device.dlpack))) for nbytes in sizes]
    widths = [tensor.bytes_per_block for tensor in spec.tensors]
    return VirtualKvStore(arenas, pool, page_bytes, fence=device.fence, block_bytes=widths)


def meeting_place(config: Config, device: Device) -> Path:
    """The folder where all engines of this user on the same physical device meet."""
    return device_folder(device.meeting_name, config.vmm.vmm_neighbours_dir)


def join(config: Config) -> Neighbours:
    """Appear among the engines of the same device. DeviceError if there is no place for that."""
    device = open_device(resolve_device(config.model.device), config)
    folder = meeting_place(config, device)
    try:
        return Neighbours(folder, model_id=config.served_model_id, device=device.name)
    except OSError as error:
        raise DeviceError(f"{folder} cannot be used: {error}; free it or set --vmm_neighbours_dir") from error


def _facts(start: Start, info: DriverInfo, size: CacheSize) -> MemoryFacts:
    virtual = start.config.vmm.enable_vmm_kvcache
    return MemoryFacts(
        model_id=start.config.served_model_id,
        device=start.device.name,
        driver=info.name if virtual else "none",
        mode=info.mode if virtual else "physical",
        page_bytes=info.page_bytes if virtual else 0,
        arena_bytes=size.arena_bytes,
    )


def _capture_graphs(start: Start, group: LocalGroup, context: int) -> None:
    """Capture decode steps if that was asked for and the device can. After the warm-up: block 0 is mapped by then."""
    flags, runtime = start.config.execution, start.device.open_graphs()
    if not flags.enable_graph:
        return
    if runtime is None:
        log.warning("--enable_graph=true changes nothing on %s: it has no graphs", start.device.name)
        return
    sizes = graph_sizes(
        flags.acl_graph_decode_batch_size_limit,
        max_tokens=flags.max_tokens_for_graph_mode,
        exact=flags.enable_graph_mode_decode_no_padding,
        rows=min(start.config.scheduler.max_seqs_per_batch, start.config.kv_cache.block_size),
    )
    if sizes:
        start.progress("capturing decode steps")
        group.capture(GraphOptions(runtime=runtime, sizes=sizes, max_context=context))


def warm_up(engine: Engine, context: int) -> None:
    """One short request through every stage, so that the first user's does not pay for first touches."""
    prompt = [0] * min(WARM_UP_TOKENS, context - 2)
    wanted = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    engine.submit(Request(request_id=WARM_UP_ID, prompt_ids=prompt, sampling=wanted))
    engine.drain(time.monotonic() + WARM_UP_SECONDS)
    if engine.has_work:
        log.warning("the warm-up request did not end within %g s; starting without", WARM_UP_SECONDS)
        engine.abort(WARM_UP_ID)
    engine.start_counting()
