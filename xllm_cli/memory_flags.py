"""The flags of memory: virtual memory, the KV cache, and KV outside the device. Declarations only, as flags.py."""

from __future__ import annotations

from typing import Literal

from xllm_cli.declare import INT32_MAX, INT64_MAX, UINT32_MAX, Section, flag, idle, unbuilt

_NO_STORE = "there is no KV-cache store"


class VmmConfig(Section):
    """Virtual memory for the KV cache and the weights"""

    enable_vmm_kvcache: bool = flag(
        False, "KV cache in virtual memory: pages come and go with the load, addresses stay", common=True
    )
    enable_vmm_weights: bool = flag(
        False, "weights in virtual memory: the model can sleep, and its memory goes to others meanwhile", common=True
    )
    vmm_elastic: bool = flag(
        False, "back pages on demand and return them; fixed takes everything at start and never waits", common=True
    )
    vmm_memory_reserve_bytes: int = flag(
        0, "bytes kept free beyond the observed execution peak; more is safer, less holds more KV", low=0,
        high=INT64_MAX, is_bytes=True, common=True,
    )  # fmt: skip
    auto_wake: bool = flag(
        False, "a request wakes a sleeping model and waits for it; off answers 503 until POST /wakeup"
    )
    auto_sleep: bool = flag(
        False, "put the least recently used idle model to sleep when another needs its pages; best with auto_wake"
    )
    sleep_idle_seconds: float = flag(
        0.0, "sleep (level 1) after so many seconds without requests; 0 never; best with auto_wake", low=0
    )
    vmm_neighbours_dir: str = flag(
        "", "folder in which the engines of a device meet; containers that share a device mount one, empty is the "
        "machine's own"
    )  # fmt: skip


class KVCacheConfig(Section):
    """The size of the KV cache and what is reused"""

    block_size: int = flag(
        128, "tokens per block; smaller shares shorter prefixes, larger has less bookkeeping", low=1, high=4096,
        common=True,
    )  # fmt: skip
    max_cache_size: int = flag(0, "cap on KV bytes; 0 is no cap", low=0, high=INT64_MAX, is_bytes=True, common=True)
    max_memory_utilization: float | None = flag(
        None, "share of the device's memory to use; unset is 0.8 for a fixed pool and physical KV, 0 (all that is free "
        "now) for elastic KV", low=0.0, high=1.0, common=True,
    )  # fmt: skip
    enable_prefix_cache: bool = flag(
        True, "keep KV of finished requests for prompts that begin alike; it yields to running requests", common=True
    )
    enable_in_batch_prefix_cache: bool = flag(
        False, "share prefixes between requests of one step, too; costs a second look at waiting requests"
    )
    xxh3_128bits_seed: int = flag(
        1024, "seed of the block hash; equal seeds make equal digests on every instance", low=0, high=UINT32_MAX
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "float32", "int8", "fp8"] = flag(
        "auto", "type of cached keys and values; auto is the model's", supported=("auto",),
        why="keys and values are cached in the model's own type",
    )  # fmt: skip
    indexer_cache_dtype: Literal["auto", "bfloat16", "float32", "int8", "fp8"] = flag(
        "auto", "type of the sparse-attention indexer's cache", supported=("auto",),
        why="no model with a sparse-attention indexer is served",
    )  # fmt: skip
    phy_page_granularity_size: int = flag(
        2 * 2**20, "page size asked of the driver; larger maps faster, smaller strands less", low=4096, high=2**30,
        multiple=4096, is_bytes=True,
    )  # fmt: skip
    max_linear_state_cache_slots: int = unbuilt(
        0, "checkpoints of linear state for prefix hits on hybrid models; 0 sizes itself", "no hybrid model is served",
        low=0, high=INT32_MAX,
    )  # fmt: skip
    enable_xtensor: bool = unbuilt(
        False, "older name of the VMM switches", "it is the older name of two switches", never=True,
        instead="--enable_vmm_kvcache=true, and --enable_vmm_weights=true for the weights",
    )  # fmt: skip


class KVCacheStoreConfig(Section):
    """KV outside the device"""

    host_blocks_factor: float = flag(
        0.0, "host blocks per device block for offloaded KV; above 1 offloads", low=0, supported=(0.0, 1.0),
        why="KV stays on the device",
    )  # fmt: skip
    enable_kvcache_store: bool = unbuilt(False, "keep KV in an external store", "KV stays on the device")
    store_protocol: str = idle("tcp", "transport to the store", _NO_STORE)
    store_master_server_address: str = idle("", "the store's master", _NO_STORE)
    store_metadata_server: str = idle("", "the store's metadata server", _NO_STORE)
    store_local_hostname: str = idle("", "this host's name in the store", _NO_STORE)
    prefetch_timeout: int = idle(0, "milliseconds to wait for a prefetch", _NO_STORE, low=0, high=UINT32_MAX)
    prefetch_batch_size: int = idle(2, "blocks of one prefetch", _NO_STORE, low=1, high=UINT32_MAX)
    layers_wise_copy_batchs: int = idle(4, "batches of layers in a copy", _NO_STORE, low=1, high=UINT32_MAX)
    enable_control_h2d_block_num: bool = idle(False, "bound the blocks copied to the device at once", _NO_STORE)
