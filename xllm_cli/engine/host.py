"""From a Config to a running engine: device, weights, cache, worker, in the order in which each can still say no.

Owns sizes and start-up; knows no requests. Every phase is named through `progress`, for the log and for /health.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from xllm_cli.cache.budget import Limits, floor_bytes
from xllm_cli.cache.manager import CacheManager
from xllm_cli.core import CacheSpec, Ready, Request, SamplingParams
from xllm_cli.engine.engine import Engine, ServingLimits
from xllm_cli.engine.grammar import Grammars
from xllm_cli.engine.report import MemoryFacts, Reporter
from xllm_cli.engine.scheduler import Scheduler, StepLimits
from xllm_cli.errors import DeviceError, MemoryShortage
from xllm_cli.flags import Config
from xllm_cli.loading import open_checkpoint
from xllm_cli.models.ops import open_ops
from xllm_cli.models.registry import Model, build_model, load_config
from xllm_cli.vmm.arena import AnonymousRange, Arena
from xllm_cli.vmm.driver import Driver, DriverInfo, VmmError, VmmShortage, open_driver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.worker.group import LocalGroup
from xllm_cli.worker.kv_store import KvStore, PhysicalKvStore, VirtualKvStore
from xllm_cli.worker.memory import HostMemoryObserver
from xllm_cli.worker.worker import Worker

log = logging.getLogger("xllm.engine")

CPU_PREFILL_TOKENS = 512  # what a step prefills on cpu when no chunk is given (DESIGN.md §8)
SPARE_BYTES = 64 << 20  # emptied pages kept mapped for a second at most, in all
SCORING_BYTES = 64 << 20  # logits of a step's prompt tokens whose log probabilities are wanted
WARM_UP_TOKENS = 64
WARM_UP_SECONDS = 20.0
WARM_UP_ID = "warm-up"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How much KV cache there may ever be. `pool_pages` is set for a fixed pool only."""

    arena_bytes: int
    num_blocks: int
    pool_pages: int | None = None


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
    driver = driver or _open_driver(config)
    progress("loading weights")
    model = _load_model(config)
    progress("reserving the KV cache")
    spec = model.cache_spec(config.kv_cache.block_size)
    size = size_cache(config, spec, driver.info())
    cache = _open_cache(config, spec, size, driver.info())
    store = _open_store(config, spec, size, driver, progress=progress, opened=opened)
    observer = opened.enter_context(closing(HostMemoryObserver(driver, store)))
    group = LocalGroup(Worker(model, store, observer, block_size=spec.block_size, num_blocks=size.num_blocks))
    opened.callback(group.close)
    cache.observe(group.observe())
    _check_capacity(cache, model_config.max_positions)
    engine = Engine(
        Scheduler(cache, _step_limits(config, model_config.vocab_size)),
        cache,
        group,
        limits=_serving_limits(config, model_config.max_positions, model_config.vocab_size),
        reporter=Reporter(cache, _facts(config, driver.info(), size)),
        grammars=Grammars(config.model.model, vocab_size=model_config.vocab_size, end_ids=model_config.eos_token_ids),
    )
    progress("warming up")
    warm_up(engine, model_config.max_positions)
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


# --- sizes


def size_cache(config: Config, spec: CacheSpec, info: DriverInfo) -> CacheSize:
    """SPEC.md §4 and §5. Elastic: addresses for r of the device, or all of it. Fixed and physical: what is free now
    less (1 - r) of the total. MemoryShortage if not even one block fits."""
    cap = config.kv_cache.max_cache_size
    if config.has_elastic_kv:
        arena = int(info.total * config.kv_ratio) if config.kv_ratio > 0 else info.total
        return _checked(CacheSize(arena, arena // spec.bytes_per_block), spec, info, cap or arena)
    kept = floor_bytes(info.total, Limits(arena_bytes=0, ratio=config.kv_ratio))
    room = max(0, info.free - kept)
    room = min(room, cap) if cap else room
    if not config.vmm.enable_vmm_kvcache:
        return _checked(CacheSize(room, room // spec.bytes_per_block), spec, info, room)
    pages = room // info.page_bytes
    arena = pages * info.page_bytes
    return _checked(CacheSize(arena, arena // spec.bytes_per_block, pages), spec, info, arena)


def _checked(size: CacheSize, spec: CacheSpec, info: DriverInfo, room: int) -> CacheSize:
    room = min(size.arena_bytes, room)
    if room < spec.bytes_per_block:
        raise MemoryShortage(
            f"the KV cache may take {room} bytes in pages of {info.page_bytes}, and one block of {spec.block_size} "
            f"tokens needs {spec.bytes_per_block}: the device has {info.total} bytes, {info.free} of them free. "
            "Raise --max_memory_utilization or --max_cache_size, or lower --block_size"
        )
    return size


def _check_capacity(cache: CacheManager, context: int) -> None:
    tokens = cache.possible_tokens()
    if tokens < cache.block_size:
        raise MemoryShortage(
            f"the KV cache may grow to {cache.possible_bytes()} bytes in pages of {cache.page_bytes}, and one block of "
            f"{cache.block_size} tokens needs {cache.spec.bytes_per_block}, {len(cache.spec.tensors)} tensors having "
            "pages of their own. Raise --max_memory_utilization or --max_cache_size, or lower --block_size"
        )
    if tokens < context:
        log.warning(
            "the KV cache can hold %d tokens, the model's context is %d: longer requests are refused", tokens, context
        )


def _open_cache(config: Config, spec: CacheSpec, size: CacheSize, info: DriverInfo) -> CacheManager:
    flags = config.kv_cache
    limits = Limits(
        arena_bytes=size.arena_bytes,
        max_cache_size=flags.max_cache_size,
        ratio=config.kv_ratio,
        reserve=config.vmm.vmm_memory_reserve_bytes,
        elastic=config.has_elastic_kv,
        pool_bytes=size.arena_bytes,
    )
    return CacheManager(
        spec,
        limits=limits,
        page_bytes=info.page_bytes if config.vmm.enable_vmm_kvcache else None,
        prefix_seed=flags.xxh3_128bits_seed if flags.enable_prefix_cache else None,
        num_blocks=size.num_blocks,
        spare_pages=SPARE_BYTES // info.page_bytes,
    )


def _step_limits(config: Config, vocab_size: int) -> StepLimits:
    flags = config.scheduler
    chunk = flags.max_tokens_per_chunk_for_prefill
    return StepLimits(
        tokens=flags.max_tokens_per_batch,
        sequences=flags.max_seqs_per_batch,
        chunk=chunk or CPU_PREFILL_TOKENS if flags.enable_chunked_prefill else None,
        prefill=CPU_PREFILL_TOKENS if flags.enable_chunked_prefill and chunk is None else None,
        share_in_batch=_shares(config),
        scored=max(1, SCORING_BYTES // (4 * vocab_size)),
    )


def _shares(config: Config) -> bool:
    return config.kv_cache.enable_prefix_cache and config.kv_cache.enable_in_batch_prefix_cache


def _serving_limits(config: Config, context: int, vocab_size: int) -> ServingLimits:
    flags, seed = config.scheduler, config.execution.random_seed
    return ServingLimits(
        max_model_len=context,
        vocab_size=vocab_size,
        longest_prompt=context if flags.enable_chunked_prefill else flags.max_tokens_per_batch,
        memory_wait_seconds=flags.memory_wait_seconds,
        random_seed=secrets.randbits(63) if seed is None else seed,
    )


def _facts(config: Config, info: DriverInfo, size: CacheSize) -> MemoryFacts:
    virtual = config.vmm.enable_vmm_kvcache
    return MemoryFacts(
        model_id=config.served_model_id,
        device="cpu",
        driver=info.name if virtual else "none",
        mode=info.mode if virtual else "physical",
        page_bytes=info.page_bytes if virtual else 0,
        arena_bytes=size.arena_bytes,
    )


# --- parts


def _open_driver(config: Config) -> Driver:
    return open_driver(
        "cpu" if config.model.device == "auto" else config.model.device,
        mode=config.host.host_page_mode,
        page_bytes=config.kv_cache.phy_page_granularity_size,
        total_bytes=config.host.host_memory_bytes or None,
    )


def _load_model(config: Config) -> Model:
    folder = config.model.model
    with closing(open_checkpoint(folder)) as checkpoint:
        return build_model(load_config(folder), open_ops("cpu"), checkpoint, config.model.dtype)


def _open_store(
    config: Config, spec: CacheSpec, size: CacheSize, driver: Driver, *, progress: Progress, opened: ExitStack
) -> KvStore:
    sizes = [tensor.bytes_per_block * size.num_blocks for tensor in spec.tensors]
    if not config.vmm.enable_vmm_kvcache:
        return PhysicalKvStore([opened.enter_context(closing(AnonymousRange(nbytes))) for nbytes in sizes])
    page_bytes = driver.info().page_bytes
    pool = PagePool(
        driver,
        page_bytes=page_bytes,
        fixed_pages=size.pool_pages,
        lock_path=None if size.pool_pages is not None else device_lock_path("cpu"),
        progress=lambda done, total: progress(f"creating pages: {done} of {total}"),
    )
    opened.callback(pool.close)
    arenas = [opened.enter_context(closing(Arena(driver, pool, nbytes))) for nbytes in sizes]
    return VirtualKvStore(arenas, pool, page_bytes, fence=_cpu_fence)


def _cpu_fence() -> None:
    """A cpu kernel has ended when its call returns: there is no work in flight to wait for."""


def device_lock_path(device: str) -> Path:
    """The lock file all engines of this user on `device` share, in a folder only this user may enter."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.access(base, os.W_OK | os.X_OK):  # unset, or inherited by a container that has no such folder
        base = tempfile.gettempdir()
    folder = Path(base) / f"xllm-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        raise DeviceError(f"{folder} must be a folder of mode 0700 of this user; remove it and start again")
    return folder / f"{device}.lock"


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
