"""From a Config to a running engine: device, weights, cache, worker, in the order in which each can still say no.

Owns the start-up; knows no requests and no device by name. Every phase is named through `progress`, for the log and
for /health.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from xllm_cli.cache.manager import CacheManager
from xllm_cli.core import Ready, Request, SamplingParams
from xllm_cli.engine.engine import Engine
from xllm_cli.engine.grammar import Grammars
from xllm_cli.engine.parts import (
    Progress,
    Rank,
    Start,
    load_model,
    meeting_place,
    open_cache,
    open_group,
    open_pool,
)
from xllm_cli.engine.report import MemoryFacts, Reporter
from xllm_cli.engine.scheduler import Scheduler
from xllm_cli.engine.sizes import CacheSize, check_capacity, serving_limits, size_beside, size_cache, step_limits
from xllm_cli.engine.slices import SliceQueue
from xllm_cli.engine.slumber import Habits
from xllm_cli.errors import DeviceError, MemoryShortage
from xllm_cli.facts import resolve_device
from xllm_cli.flags import Config
from xllm_cli.models.config import ModelConfig
from xllm_cli.models.registry import Model, load_config
from xllm_cli.neighbours.peers import Neighbours
from xllm_cli.vmm.driver import Driver, VmmError, VmmShortage
from xllm_cli.worker.device import open_device
from xllm_cli.worker.graphs import GraphOptions, graph_sizes
from xllm_cli.worker.group import LocalGroup
from xllm_cli.worker.memory import MemoryObserver
from xllm_cli.worker.sharing import Loaded, WeightsShare

log = logging.getLogger("xllm.engine")

WARM_UP_TOKENS = 64
WARM_UP_SECONDS = 20.0
WARM_UP_ID = "warm-up"

Meet = Callable[[CacheManager, WeightsShare | None], None]


class Built(NamedTuple):
    """A warmed-up engine, what to tell clients of it, and what others in its pool may share or must know."""

    engine: Engine
    ready: Ready
    cache: CacheManager
    form: ModelConfig
    loaded: Loaded | None
    observer: MemoryObserver


def build_engine(config: Config, progress: Progress, driver: Driver | None = None) -> tuple[Engine, Ready]:
    """An engine of one model. `driver` replaces the device's own (tests wrap it).

    Raises ModelError, DeviceError or MemoryShortage; nothing stays behind then.
    """
    _, built = build_first(config, progress, driver)
    return built.engine, built.ready


def build_first(
    config: Config, progress: Progress, driver: Driver | None = None, beat: Callable[[], None] = lambda: None
) -> tuple[Start, Built]:
    """As build_engine, and what other models in the same pool start from. `beat` is called often while weights are
    read, also later, when they are read again."""
    with ExitStack() as opened, explained():
        progress("reading the model's configuration")
        load_config(config.model.model)  # what is wrong there is said before anything is opened
        progress("opening the device")
        device = open_device(resolve_device(config.model.device), config)
        driver = driver or device.open_driver()
        pool = open_pool(config, device, driver, opened)
        start = Start(config, device, driver, pool, progress, opened, SliceQueue(beat))
        built = build(start)
        opened.pop_all()  # the engine closes them from here on
        return start, built


@contextmanager
def explained() -> Iterator[None]:
    """What the device refuses while an engine is built leaves as a MemoryShortage or DeviceError."""
    try:
        yield
    except VmmShortage as error:
        raise MemoryShortage(
            f"the device has no room for the KV cache: {error}. Lower --max_memory_utilization or --max_cache_size"
        ) from error
    except VmmError as error:
        raise DeviceError(f"the device failed while the KV cache was set up: {error}") from error


def build(start: Start, meet: Meet = lambda cache, weights: None) -> Built:
    """One model's engine. What it opens stays in `start.opened`: the engine closes it, too. `meet` tells the books of
    one that joins others what they hold."""
    config, device = start.config, start.device
    model_config = load_config(config.model.model)
    parts = _open_model(start)
    cache, group = parts.cache, parts.group
    cache.observe(group.observe())
    meet(cache, group.weights)
    check_capacity(cache, model_config.max_positions)
    engine = Engine(
        Scheduler(cache, step_limits(config, device.prefill_tokens, model_config.vocab_size)),
        cache,
        group,
        limits=serving_limits(config, model_config.max_positions, model_config.vocab_size),
        reporter=Reporter(cache, _facts(start, parts.size), group.weights),
        habits=Habits(config.vmm.auto_wake, config.vmm.sleep_idle_seconds),
        grammars=Grammars(config.model.model, vocab_size=model_config.vocab_size, end_ids=model_config.eos_token_ids),
    )
    start.progress("warming up")
    _warm_up(start, engine, model_config.max_positions)
    _capture_graphs(start, group, model_config.max_positions)
    cache.observe(group.observe())
    ready = Ready(
        model_id=config.served_model_id,
        architecture=model_config.architecture,
        dtype=model_config.resolve_dtype(config.model.dtype),
        max_model_len=model_config.max_positions,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        capacity_tokens=cache.possible_tokens(),
        snapshot=engine.snapshot(),
    )
    loaded = None if group.weights is None else Loaded(parts.model, group.weights)
    return Built(engine, ready, cache, model_config, loaded, group.observer)


def join(config: Config) -> Neighbours:
    """Appear among the engines of the same device. DeviceError if there is no place for that."""
    device = open_device(resolve_device(config.model.device), config)
    folder = meeting_place(config, device)
    try:
        return Neighbours(folder, model_id=config.served_model_id, device=device.name)
    except OSError as error:
        raise DeviceError(f"{folder} cannot be used: {error}; free it or set --vmm_neighbours_dir") from error


class _Parts(NamedTuple):
    model: Model
    cache: CacheManager
    group: LocalGroup
    size: CacheSize


def _open_model(start: Start) -> _Parts:
    """Weights first: what is left is the cache's."""
    config, device = start.config, start.device
    start.progress("loading weights")
    model, weights = load_model(start)
    start.progress("reserving the KV cache")
    spec = model.cache_spec(config.kv_cache.block_size)
    if start.limits is not None and config.vmm.enable_vmm_kvcache and not config.has_elastic_kv:
        size = size_beside(start.limits, spec, device.largest_range)
    else:
        promised = start.promised + (0 if start.pool is None else start.pool.owned * start.pool.page_bytes)
        info = start.driver.info()
        size = size_cache(config, spec, info, device.largest_range, is_host=device.is_host, promised=promised)
    rank = Rank(model, weights, spec, size)
    return _Parts(model, open_cache(start, rank), open_group(start, rank), size)


def _facts(start: Start, size: CacheSize) -> MemoryFacts:
    virtual, info = start.config.has_pool, start.driver.info()
    return MemoryFacts(
        model_id=start.config.served_model_id,
        device=start.device.name,
        driver=info.name if virtual else "none",
        mode=info.mode if virtual else "physical",
        page_bytes=info.page_bytes if virtual else 0,
        arena_bytes=size.arena_bytes,
        has_virtual_kv=start.config.vmm.enable_vmm_kvcache,
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


def _warm_up(start: Start, engine: Engine, context: int) -> None:
    """One short request through every stage, so that the first user's does not pay for first touches, and so that it is
    known what a step needs.

    A twin runs what has run: nothing is new but, where rows are padded, the pages of block 0. Others that join have
    whatever memory there is now: the models that are there stand still meanwhile.
    """
    if start.twin is None or start.device.pads_rows:
        wanted = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        prompt = [0] * min(1 if start.twin is not None else WARM_UP_TOKENS, context - 2)
        engine.submit(Request(request_id=WARM_UP_ID, prompt_ids=prompt, sampling=wanted))
        if start.limits is None:
            engine.drain(time.monotonic() + WARM_UP_SECONDS)
        else:
            _drain_while_it_runs(engine, most=2 * WARM_UP_TOKENS)
        if engine.has_work:
            log.warning("the warm-up request found no memory; starting without")
            engine.abort(WARM_UP_ID)
    engine.start_counting()


def _drain_while_it_runs(engine: Engine, *, most: int) -> None:
    for _ in range(most):
        engine.step()
        if not engine.is_running:
            return
