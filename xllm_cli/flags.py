"""Every flag once: its name, type, default, range, and the line of help that says what it trades.

The frozen sections below and in service_flags.py are the only declaration; everything else is generated from `FLAGS`.
"Unset" is None; a value that other flags imply is a property of `Config`, never written back. This module knows no
rule (rules.py), no source of values (sources.py) and nothing that runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, cast

from xllm_cli.declare import INT64_MAX, Flag, Section, declared, flag
from xllm_cli.service_flags import SecurityConfig as SecurityConfig
from xllm_cli.service_flags import ServiceConfig as ServiceConfig

INT32_MAX = 2**31 - 1


class ModelConfig(Section):
    """The checkpoint and the device it runs on"""

    model: str = flag("", "checkpoint folder (config.json, tokenizer, safetensors)", common=True)
    model_id: str = flag("", "name clients ask for; empty is the folder's name", common=True)
    device: Literal["auto", "npu", "cuda", "cpu"] = flag(
        "auto", "auto is the first usable one", supported=("auto", "cpu"), common=True
    )
    backend: Literal["", "llm", "vlm", "dit", "rec"] = flag(
        "", "kind of model; empty reads it from the checkpoint", supported=("", "llm")
    )
    task: Literal["generate", "embed", "mm_embed"] = flag(
        "generate", "what the model is asked for", supported=("generate",)
    )
    dtype: Literal["auto", "bfloat16", "float32"] = flag(
        "auto", "auto is the checkpoint's; float32 is exact and twice the memory of bfloat16", common=True
    )


class LoadConfig(Section):
    """How weights are read"""

    enable_manual_loader: bool = flag(
        False, "stage weights in host memory; on implicitly with enable_vmm_weights", status="accepted",
        why="weights without enable_vmm_weights are read straight from the checkpoint's files",
    )  # fmt: skip


class VmmConfig(Section):
    """Virtual memory for the KV cache and the weights"""

    enable_vmm_kvcache: bool = flag(
        False, "KV cache in virtual memory: pages come and go with the load, addresses stay", common=True
    )
    enable_vmm_weights: bool = flag(
        False, "weights in virtual memory: the model can sleep and fork", status="unsupported", common=True
    )
    vmm_elastic: bool = flag(
        False, "back pages on demand and return them; fixed takes everything at start and never waits", common=True
    )
    vmm_memory_reserve_bytes: int = flag(
        0, "bytes kept free beyond the observed execution peak; more is safer, less holds more KV", low=0,
        high=INT64_MAX, is_bytes=True, common=True,
    )  # fmt: skip
    vmm_neighbours_dir: str = flag(
        "", "folder in which the engines of a device meet; containers that share a device mount one, empty is the "
        "machine's own"
    )


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
        1024, "seed of the block hash; equal seeds make equal digests on every instance", low=0, high=2**32 - 1
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "float32", "int8", "fp8"] = flag(
        "auto", "type of cached keys and values; auto is the model's", supported=("auto",)
    )
    indexer_cache_dtype: Literal["auto", "bfloat16", "float32", "int8", "fp8"] = flag(
        "auto", "type of the sparse-attention indexer's cache", supported=("auto",)
    )
    phy_page_granularity_size: int = flag(
        2 * 2**20, "page size asked of the driver; larger maps faster, smaller strands less", low=4096, high=2**30,
        multiple=4096, is_bytes=True,
    )  # fmt: skip
    max_linear_state_cache_slots: int = flag(
        0, "checkpoints of linear state for prefix hits on hybrid models; 0 sizes itself", low=0, high=INT32_MAX,
        status="unsupported",
    )  # fmt: skip


class KVCacheStoreConfig(Section):
    """KV outside the device"""

    host_blocks_factor: float = flag(
        0.0, "host blocks per device block for offloaded KV; above 1 offloads", low=0, supported=(0.0, 1.0)
    )
    enable_kvcache_store: bool = flag(False, "keep KV in an external store", status="unsupported")


class SchedulerConfig(Section):
    """What one step computes and who waits"""

    max_tokens_per_batch: int = flag(
        10240, "tokens a step computes at most; more throughput, longer steps", low=1, high=INT32_MAX, common=True,
    )  # fmt: skip
    max_seqs_per_batch: int = flag(1024, "sequences in a step at most", low=1, high=INT32_MAX, common=True)
    enable_chunked_prefill: bool = flag(
        True, "cut long prompts so that running requests keep their pace; off finishes a prompt in one step"
    )
    max_tokens_per_chunk_for_prefill: int | None = flag(
        None, "prompt tokens a step takes; unset is the device's choice (cpu: 512)", low=1, high=INT32_MAX, unset=-1
    )
    memory_wait_seconds: float = flag(60.0, "seconds a request waits alone for memory before 503", low=0)
    enable_schedule_overlap: bool = flag(
        False, "prepare the next step during this one", status="accepted", why="steps run one after the other"
    )
    enable_task_pipeline: bool | None = flag(
        None, "pipeline of host and device work; unset is false", status="accepted", why="there is no task pipeline"
    )


class ParallelConfig(Section):
    """How a model is cut over devices"""

    tp_size: int = flag(1, "devices that share each layer", low=1, high=1024, supported=(1,))
    dp_size: int = flag(1, "replicas that share the requests", low=1, high=1024, supported=(1,))
    communication_backend: Literal["hccl", "lccl", "nccl", "gloo"] = flag(
        "hccl", "library of collective operations", status="accepted", why="one rank has nobody to talk to"
    )


class DistributedConfig(Section):
    """Ranks on several hosts, and the routing service"""

    nnodes: int = flag(1, "number of ranks", low=1, high=4096, supported=(1,))
    node_rank: int | None = flag(None, "run exactly this rank; unset starts all", low=0, high=4095, supported=(None, 0))
    master_node_addr: str = flag(
        "127.0.0.1:19888", "HOST:PORT where ranks meet", status="accepted", why="one rank needs no meeting point"
    )
    enable_service_routing: bool = flag(
        False, "report load and KV events to the routing service", status="accepted",
        why="no events are published to a routing service",
    )  # fmt: skip


class DisaggPDConfig(Section):
    """Prefill and decode on separate instances"""

    enable_disagg_pd: bool = flag(False, "separate prefill from decode", status="unsupported")


class SpeculativeConfig(Section):
    """Speculative decoding"""

    draft_model: str = flag("", "folder of the draft; empty is a draft inside the model", status="unsupported")
    num_speculative_tokens: int = flag(
        0, "tokens drafted per step; 0 is off; more pays only while drafts are accepted", low=0, high=64,
        status="unsupported",
    )  # fmt: skip
    speculative_algorithm: Literal["MTP", "Eagle3", "Suffix", "DFlash", "DSpark"] = flag(
        "MTP", "how tokens are drafted", supported=("MTP",)
    )


class ExecutionConfig(Section):
    """How a step runs"""

    random_seed: int | None = flag(
        None, "seed of requests that bring none; unset differs at every start", low=0, high=INT32_MAX, unset=-1
    )


class HostConfig(Section):
    """The cpu device: host memory"""

    host_memory_bytes: int = flag(
        0, "memory that counts as the device's total; 0 is the machine's or the container's", low=0, high=INT64_MAX,
        is_bytes=True,
    )  # fmt: skip
    host_page_mode: Literal["auto", "huge", "4k"] = flag(
        "auto", "huge maps faster and fails cleanly; 4k runs on every kernel; auto is huge where it works"
    )


class Config(Section):
    """All sections. It crosses processes as JSON: `model_dump_json` and `model_validate_json` are inverse."""

    service: ServiceConfig = ServiceConfig()
    security: SecurityConfig = SecurityConfig()
    model: ModelConfig = ModelConfig()
    load: LoadConfig = LoadConfig()
    vmm: VmmConfig = VmmConfig()
    kv_cache: KVCacheConfig = KVCacheConfig()
    kv_store: KVCacheStoreConfig = KVCacheStoreConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    distributed: DistributedConfig = DistributedConfig()
    disagg: DisaggPDConfig = DisaggPDConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    execution: ExecutionConfig = ExecutionConfig()
    host: HostConfig = HostConfig()

    @property
    def has_elastic_kv(self) -> bool:
        """KV pages are backed on demand; `vmm_elastic` without a switch changes nothing (R14)."""
        return self.vmm.enable_vmm_kvcache and self.vmm.vmm_elastic

    @property
    def has_pool(self) -> bool:
        """There is a page pool: KV, weights or both live in it."""
        return self.vmm.enable_vmm_kvcache or self.vmm.enable_vmm_weights

    @property
    def kv_ratio(self) -> float:
        """The effective `max_memory_utilization`, r of DESIGN.md §7: unset is 0 for elastic KV and 0.8 otherwise."""
        ratio = self.kv_cache.max_memory_utilization
        if ratio is None:
            return 0.0 if self.has_elastic_kv else 0.8
        return ratio

    @property
    def implied_manual_loader(self) -> bool:
        """Weights in virtual memory switch the manual loader on; KV alone does not (R1)."""
        return self.load.enable_manual_loader or self.vmm.enable_vmm_weights

    @property
    def served_model_id(self) -> str:
        """The name clients ask for."""
        return self.model.model_id or os.path.basename(os.path.abspath(self.model.model))

    def value(self, name: str) -> Any:
        """The value of a flag by its name."""
        return getattr(getattr(self, FLAGS[name].section), name)


class LaunchConfig(Section):
    """What this call does; not part of the configuration"""

    config_json_file: str = flag("", "JSON file of flags; the command line wins over it", common=True)
    print_config: Literal["false", "true", "sources"] = flag(
        "false", "print the configuration as JSON and exit; =sources adds where each value came from", bare="true",
        common=True,
    )  # fmt: skip
    help: str = flag("", "this help; =all lists every flag, =WORD those about a word", bare="short")


def sections() -> Iterator[tuple[str, type[Section]]]:
    """Attribute name and class of every section of Config, in order."""
    for name, field in Config.model_fields.items():
        yield name, cast(type[Section], field.annotation)


def _declarations() -> Iterator[Flag]:
    for name, section in sections():
        yield from declared(name, section)
    yield from declared("launch", LaunchConfig)


FLAGS: Mapping[str, Flag] = MappingProxyType({one.name: one for one in _declarations()})
