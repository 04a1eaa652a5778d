"""What the cache tells about itself: counters, and the bands that mapped bytes fall into.

Reads BlockPool and Residency, changes neither.

    mapped = kv_live (with padding) + kv_cached + kv_idle + kv_spare
    kv_live, kv_cached   bytes of held and of cached blocks on mapped pages
    kv_idle              mapped bytes that no block holds, on pages some block keeps
    kv_spare             mapped bytes on pages no block touches
"""

from __future__ import annotations

from dataclasses import dataclass

from xllm_cli.cache.blocks import CACHED, HELD, PADDING, BlockPool
from xllm_cli.cache.residency import Residency


@dataclass(slots=True)
class CacheCounters:
    """Totals that only grow.

    `evicted_blocks` were forgotten because memory was short. Queries and hits are tokens, counted once per admission.
    """

    pages_mapped: int = 0
    pages_unmapped: int = 0
    map_failures: int = 0
    evicted_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


def bands(pool: BlockPool, residency: Residency, bytes_per_block: int) -> dict[str, int]:
    """The KV bands in bytes, exactly additive. O(pages wanted but not mapped), which is none after a step that ran."""
    live = (pool.num_held + pool.first_block) * bytes_per_block
    cached = pool.num_cached * bytes_per_block
    for block, nbytes in residency.unmapped_parts():
        state = pool.state(block)
        if state in (HELD, PADDING):
            live -= nbytes
        elif state == CACHED:
            cached -= nbytes
    mapped, spare = residency.mapped_bytes, residency.unwanted_bytes
    idle = mapped - live - cached - spare
    return {"mapped": mapped, "kv_live": live, "kv_cached": cached, "kv_idle": idle, "kv_spare": spare}
