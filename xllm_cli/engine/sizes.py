"""How large the cache of an engine becomes and how much one step may do: flags and a device's numbers in, numbers out.

SPEC.md §4 and §5. Opens nothing and knows no device by name.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass

from xllm_cli.cache.budget import Limits, floor_bytes
from xllm_cli.cache.manager import CacheManager
from xllm_cli.core import CacheSpec
from xllm_cli.engine.admission import ServingLimits
from xllm_cli.engine.draft import StepLimits
from xllm_cli.errors import MemoryShortage
from xllm_cli.flags import Config
from xllm_cli.vmm.driver import DriverInfo

log = logging.getLogger("xllm.engine")

SCORING_BYTES = 64 << 20  # logits of a step's prompt tokens whose log probabilities are wanted


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How much KV cache there may ever be. `pool_pages` is set for a fixed pool only."""

    arena_bytes: int
    num_blocks: int
    pool_pages: int | None = None


def size_cache(
    config: Config,
    spec: CacheSpec,
    info: DriverInfo,
    largest_range: int | None = None,
    *,
    is_host: bool = True,
    promised: int = 0,
) -> CacheSize:
    """SPEC.md §4 and §5. Elastic: addresses for r of the device, or all of it. Fixed and physical: what is free now
    less (1 - r) of the total. No tensor takes more than `largest_range` bytes of addresses. `promised` bytes are
    others' of this process: a host's memory looks free until it is written.

    MemoryShortage if not even one block fits.
    """
    cap = config.kv_cache.max_cache_size
    pages: int | None = None
    if config.has_elastic_kv:
        arena = int(info.total * config.kv_ratio) if config.kv_ratio > 0 else info.total
        room = cap or arena
    else:
        kept = floor_bytes(info.total, Limits(arena_bytes=0, ratio=config.kv_ratio, host=is_host))
        arena = max(0, min(info.free, info.total - promised) - kept)
        arena = min(arena, cap) if cap else arena
        if config.vmm.enable_vmm_kvcache:
            pages = arena // info.page_bytes
            arena = pages * info.page_bytes
        room = arena
    blocks = arena // spec.bytes_per_block
    if largest_range is not None:
        blocks = min(blocks, largest_range // max(tensor.bytes_per_block for tensor in spec.tensors))
    _check_one_block(spec, info, min(arena, room))
    return CacheSize(arena, blocks, pages)


def size_beside(limits: Limits, spec: CacheSpec, largest_range: int | None = None) -> CacheSize:
    """Addresses for the KV of a model that joins others in a fixed pool: all of it may be this model's one day."""
    blocks = limits.arena_bytes // spec.bytes_per_block
    if largest_range is not None:
        blocks = min(blocks, largest_range // max(tensor.bytes_per_block for tensor in spec.tensors))
    return CacheSize(limits.arena_bytes, blocks)


def _check_one_block(spec: CacheSpec, info: DriverInfo, room: int) -> None:
    if room < spec.bytes_per_block:
        raise MemoryShortage(
            f"the KV cache may take {room} bytes in pages of {info.page_bytes}, and one block of {spec.block_size} "
            f"tokens needs {spec.bytes_per_block}: the device has {info.total} bytes, {info.free} of them free. "
            "Raise --max_memory_utilization or --max_cache_size, or lower --block_size"
        )


def check_capacity(cache: CacheManager, context: int) -> None:
    """MemoryShortage when not one block could ever be mapped; a warning when the model's context does not fit."""
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


def cache_limits(config: Config, size: CacheSize, *, is_host: bool, weights: int = 0) -> Limits:
    """What caps the cache's bytes, and those of `weights` that live in pages beside it: an elastic arena was sized for
    both, any other for what the weights left."""
    arena = size.arena_bytes + (0 if config.has_elastic_kv else weights)
    return Limits(
        arena_bytes=arena,
        max_cache_size=config.kv_cache.max_cache_size,
        ratio=config.kv_ratio,
        reserve=config.vmm.vmm_memory_reserve_bytes,
        elastic=config.has_elastic_kv,
        pool_bytes=arena,
        host=is_host,
    )


def step_limits(config: Config, prefill_tokens: int, vocab_size: int) -> StepLimits:
    """What a step computes at most; `prefill_tokens` is the device's choice where no chunk is given."""
    flags, kv = config.scheduler, config.kv_cache
    chunk = flags.max_tokens_per_chunk_for_prefill
    return StepLimits(
        tokens=flags.max_tokens_per_batch,
        sequences=flags.max_seqs_per_batch,
        chunk=chunk or prefill_tokens if flags.enable_chunked_prefill else None,
        prefill=prefill_tokens if flags.enable_chunked_prefill and chunk is None else None,
        share_in_batch=kv.enable_prefix_cache and kv.enable_in_batch_prefix_cache,
        scored=max(1, SCORING_BYTES // (4 * vocab_size)),
        by_priority=flags.priority_strategy == "priority",
    )


def serving_limits(config: Config, context: int, vocab_size: int) -> ServingLimits:
    """What a request may ask for."""
    flags, seed = config.scheduler, config.execution.random_seed
    return ServingLimits(
        max_model_len=context,
        vocab_size=vocab_size,
        longest_prompt=context if flags.enable_chunked_prefill else flags.max_tokens_per_batch,
        memory_wait_seconds=flags.memory_wait_seconds,
        random_seed=secrets.randbits(63) if seed is None else seed,
    )
