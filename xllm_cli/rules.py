"""The rules of what goes together: a table of (name, flags, limit, when broken, fixes).

R1 to R17 are the specification's, C1 and following are those of devices and of flags that belong together. One row's
`limit` is both the reason in a message and the line of the README's table. A rule reads a configuration and
the facts about machine and checkpoint, nothing else; a refusal and a warning differ in one field. Rules of behaviour
(R1, R4) are properties of Config and answers of the server; here are only their warnings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xllm_cli.facts import Facts
from xllm_cli.flags import FLAGS, Config

Change = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration to judge, the facts, and the source of each flag that was given (absent: default)."""

    config: Config
    facts: Facts = field(default_factory=Facts)
    sources: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.config.value(name)

    @property
    def kv(self) -> bool:
        return self.config.vmm.enable_vmm_kvcache

    @property
    def weights(self) -> bool:
        return self.config.vmm.enable_vmm_weights

    @property
    def device(self) -> str:
        return self.facts.auto if self["device"] == "auto" else self.config.model.device

    @property
    def has_mtp(self) -> bool:
        return self.config.speculative.num_speculative_tokens > 0 and self["speculative_algorithm"] == "MTP"

    @property
    def has_embedded_eagle(self) -> bool:
        draft, model = self.config.speculative.draft_model, self.config.model.model
        is_embedded = not draft or (bool(model) and os.path.realpath(draft) == os.path.realpath(model))
        return self["speculative_algorithm"] == "Eagle3" and is_embedded

    @property
    def has_ragged_chunk(self) -> bool:
        chunk = self.config.scheduler.max_tokens_per_chunk_for_prefill
        return chunk is not None and chunk % self.config.kv_cache.block_size != 0

    def changed(self, change: Change) -> Case:
        """The same case with other values of some flags."""
        values = self.config.model_dump()
        for name, value in change.items():
            values[FLAGS[name].section][name] = value
        return Case(Config.model_validate(values), self.facts, {**self.sources, **dict.fromkeys(change, "fix")})


class Rule(NamedTuple):
    """`fixes`: changes that mend it, the smallest first. `is_warning`: it starts all the same, with one warning."""

    name: str
    flags: tuple[str, ...]
    limit: str
    broken: Callable[[Case], bool]
    fixes: Callable[[Case], Iterable[Change]]
    is_warning: bool = False


def _set(**change: Any) -> Callable[[Case], Iterable[Change]]:
    return lambda case: (change,)


def _either(*changes: Change) -> Callable[[Case], Iterable[Change]]:
    return lambda case: changes


def _whole_chunk(case: Case) -> Iterable[Change]:
    """The chunk rounded down to whole blocks, at least one."""
    chunk, block = case["max_tokens_per_chunk_for_prefill"], case["block_size"]
    yield {"max_tokens_per_chunk_for_prefill": max(1, chunk // block) * block}


_QUANTIZED = ("int8", "fp8")
_HUGE = 2 * 2**20

RULES: tuple[Rule, ...] = (
    Rule(
        "R1", ("enable_manual_loader", "enable_vmm_weights"),
        "weights in virtual memory switch the manual loader on, whatever enable_manual_loader says",
        lambda c: c.weights and not c["enable_manual_loader"] and "enable_manual_loader" in c.sources,
        _set(enable_manual_loader=True), is_warning=True,
    ),
    Rule(
        "R2", ("enable_vmm_weights", "backend"),
        "weights in virtual memory need the LLM backend",
        lambda c: c.weights and c["backend"] not in ("", "llm"),
        _set(enable_vmm_weights=False),
    ),
    Rule(
        "R2", ("enable_vmm_weights", "model"),
        "weights in virtual memory need the LLM backend, and the checkpoint is a vlm or dit model",
        lambda c: c.weights and c["backend"] == "" and c.facts.backend not in (None, "llm"),
        _set(enable_vmm_weights=False),
    ),
    Rule(
        "R3", ("enable_vmm_weights", "enable_vmm_kvcache", "vmm_elastic"),
        "a fixed weight-page pool would take the memory that the physical KV cache needs",
        lambda c: c.weights and not c.kv and not c["vmm_elastic"],
        _either({"vmm_elastic": True}, {"enable_vmm_kvcache": True}, {"enable_vmm_weights": False}),
    ),
    Rule(
        "R5", ("enable_vmm_kvcache", "enable_service_routing"),
        "with a virtual KV cache no KV-cache events are published",
        lambda c: c.kv and c["enable_service_routing"],
        _set(enable_service_routing=False), is_warning=True,
    ),
    Rule(
        "R6", ("enable_task_pipeline", "enable_vmm_kvcache"),
        "the task pipeline does not support the virtual KV cache yet",
        lambda c: bool(c["enable_task_pipeline"]) and c.kv,
        _set(enable_task_pipeline=False),
    ),
    Rule(
        "R6", ("enable_task_pipeline", "speculative_algorithm", "num_speculative_tokens"),
        "the task pipeline does not support MTP yet, on any KV cache",
        lambda c: bool(c["enable_task_pipeline"]) and c.has_mtp,
        _set(enable_task_pipeline=False),
    ),
    Rule(
        "R7", ("enable_vmm_weights", "draft_model"),
        "weights in virtual memory cannot be combined with an external draft",
        lambda c: c.weights and c["draft_model"] != "",
        _either({"enable_vmm_weights": False}, {"draft_model": ""}),
    ),
    Rule(
        "R7", ("enable_vmm_weights", "model"),
        "weights in virtual memory cannot be combined with a hybrid model's linear-state cache",
        lambda c: c.weights and c.facts.is_hybrid,
        _set(enable_vmm_weights=False),
    ),
    Rule(
        "R8", ("enable_vmm_kvcache", "speculative_algorithm", "draft_model"),
        "the virtual KV cache does not support an embedded Eagle3 draft (draft_model empty or equal to model)",
        lambda c: c.kv and c.has_embedded_eagle,
        _set(enable_vmm_kvcache=False),
    ),
    Rule(
        "R9", ("enable_vmm_kvcache", "num_speculative_tokens", "enable_disagg_pd"),
        "the virtual KV cache does not support speculative decoding with prefill/decode disaggregation",
        lambda c: c.kv and c["num_speculative_tokens"] > 0 and c["enable_disagg_pd"],
        _either({"num_speculative_tokens": 0}, {"enable_disagg_pd": False}),
    ),
    Rule(
        "R10", ("enable_vmm_kvcache", "kv_cache_dtype"),
        "the virtual KV cache does not support a quantized KV cache",
        lambda c: c.kv and c["kv_cache_dtype"] in _QUANTIZED,
        _set(kv_cache_dtype="auto"),
    ),
    Rule(
        "R10", ("enable_vmm_kvcache", "indexer_cache_dtype"),
        "the virtual KV cache does not support a quantized indexer cache",
        lambda c: c.kv and c["indexer_cache_dtype"] in _QUANTIZED,
        _set(indexer_cache_dtype="auto"),
    ),
    Rule(
        "R11", ("enable_vmm_kvcache", "host_blocks_factor"),
        "the virtual KV cache does not support host offload (host_blocks_factor above 1)",
        lambda c: c.kv and c["host_blocks_factor"] > 1,
        _set(host_blocks_factor=0.0),
    ),
    Rule(
        "R11", ("enable_vmm_kvcache", "enable_kvcache_store"),
        "the virtual KV cache does not support a KV-cache store",
        lambda c: c.kv and c["enable_kvcache_store"],
        _set(enable_kvcache_store=False),
    ),
    Rule(
        "R12", ("enable_disagg_pd", "enable_vmm_kvcache", "enable_vmm_weights", "vmm_elastic"),
        "prefill/decode disaggregation needs a fully resident pool with either VMM switch",
        lambda c: c["enable_disagg_pd"] and c.config.has_pool and c["vmm_elastic"],
        _either({"vmm_elastic": False}, {"enable_disagg_pd": False}),
    ),
    Rule(
        "R12", ("enable_disagg_pd", "enable_vmm_kvcache", "enable_vmm_weights", "max_memory_utilization"),
        "prefill/decode disaggregation needs a positive ratio with either VMM switch",
        lambda c: c["enable_disagg_pd"] and c.config.has_pool and c["max_memory_utilization"] == 0,
        _set(max_memory_utilization=0.8),
    ),
    Rule(
        "R13", ("max_memory_utilization", "max_cache_size", "enable_vmm_kvcache", "vmm_elastic"),
        "a fixed pool or a physical KV cache needs a size: a positive ratio or a positive max_cache_size",
        lambda c: c.config.kv_ratio == 0 and c["max_cache_size"] == 0 and not c.config.has_elastic_kv,
        _set(max_memory_utilization=0.8),
    ),
    Rule(
        "R14", ("vmm_elastic", "enable_vmm_kvcache", "enable_vmm_weights"),
        "vmm_elastic changes nothing while neither enable_vmm_kvcache nor enable_vmm_weights is on",
        lambda c: c["vmm_elastic"] and not c.config.has_pool,
        _either({"vmm_elastic": False}, {"enable_vmm_kvcache": True}), is_warning=True,
    ),
    Rule(
        "R15", ("device", "enable_vmm_kvcache", "enable_vmm_weights"),
        "the device has no VMM driver here",
        lambda c: c.config.has_pool and c.device not in c.facts.drivers,
        _either({"device": "cpu"}, {"enable_vmm_kvcache": False, "enable_vmm_weights": False}),
    ),
    Rule(
        "R16", ("max_tokens_per_chunk_for_prefill", "block_size", "enable_prefix_cache", "model"),
        "a hybrid model with prefix cache needs a prefill chunk that is a multiple of block_size",
        lambda c: c.facts.is_hybrid and c["enable_prefix_cache"] and c["enable_chunked_prefill"] and c.has_ragged_chunk,
        _whole_chunk,
    ),
    Rule(
        "R17", ("device", "block_size"),
        "npu kernels need blocks of 128 tokens",
        lambda c: c.device == "npu" and c["block_size"] != 128,
        _set(block_size=128),
    ),
    Rule(
        "C1", ("device", "phy_page_granularity_size", "enable_vmm_kvcache", "enable_vmm_weights"),
        "pages of npu and cuda are multiples of 2 MiB",
        lambda c: c.device in ("npu", "cuda") and c.config.has_pool and c["phy_page_granularity_size"] % _HUGE != 0,
        _set(phy_page_granularity_size=_HUGE),
    ),
    Rule(
        "C2", ("host_page_mode", "phy_page_granularity_size"),
        "huge pages are multiples of 2 MiB",
        lambda c: c["host_page_mode"] == "huge" and c["phy_page_granularity_size"] % _HUGE != 0,
        _either({"phy_page_granularity_size": _HUGE}, {"host_page_mode": "auto"}),
    ),
    Rule(
        "C3", ("node_rank", "nnodes"),
        "ranks are numbered from 0 to nnodes - 1",
        lambda c: c["node_rank"] is not None and c["node_rank"] >= c["nnodes"],
        lambda c: ({"nnodes": c["node_rank"] + 1}, {"node_rank": None}),
    ),
    Rule(
        "C4", ("vmm_memory_reserve_bytes", "vmm_elastic", "enable_vmm_kvcache", "enable_vmm_weights"),
        "the reserve is kept free by growing less, and only an elastic pool grows",
        lambda c: c["vmm_memory_reserve_bytes"] > 0 and not (c["vmm_elastic"] and c.config.has_pool),
        _set(vmm_memory_reserve_bytes=0), is_warning=True,
    ),
    Rule(
        "C5", ("max_tokens_per_chunk_for_prefill", "enable_chunked_prefill"),
        "without chunked prefill there are no chunks to bound",
        lambda c: c["max_tokens_per_chunk_for_prefill"] is not None and not c["enable_chunked_prefill"],
        _set(max_tokens_per_chunk_for_prefill=None), is_warning=True,
    ),
    Rule(
        "C6", ("enable_in_batch_prefix_cache", "enable_prefix_cache"),
        "without a prefix cache there is nothing to share within a batch",
        lambda c: c["enable_in_batch_prefix_cache"] and not c["enable_prefix_cache"],
        _set(enable_in_batch_prefix_cache=False), is_warning=True,
    ),
    Rule(
        "C7", ("auto_wake", "auto_sleep", "sleep_idle_seconds", "enable_vmm_weights"),
        "only a model whose weights are in virtual memory sleeps and wakes",
        lambda c: (c["auto_wake"] or c["auto_sleep"] or c["sleep_idle_seconds"] > 0) and not c.weights,
        _set(auto_wake=False, auto_sleep=False, sleep_idle_seconds=0.0), is_warning=True,
    ),
)  # fmt: skip
