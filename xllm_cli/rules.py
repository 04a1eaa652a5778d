"""The rules of what goes together: a table of (name, flags, limit, when broken, fixes).

One row's `limit` is both the reason in a message and the line of the README's table. A rule reads a configuration and
the facts about machine and checkpoint, nothing else; a refusal and a warning differ in one field. Rules of behaviour
(R1, R4) are properties of Config and answers of the server; here are only their warnings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xllm_cli.declare import Flag
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
)  # fmt: skip


def broken_rules(case: Case) -> list[Rule]:
    """The rules that refuse this configuration."""
    return [rule for rule in RULES if not rule.is_warning and rule.broken(case)]


def smallest_fix(rule: Rule, case: Case) -> Change:
    """The first of the rule's fixes that breaks no rule that held before, else the first that mends this one."""
    before = set(broken_rules(case))
    mending = [fix for fix in rule.fixes(case) if not rule.broken(case.changed(fix))]
    return next((fix for fix in mending if set(broken_rules(case.changed(fix))) <= before), mending[0])


def problems(case: Case) -> list[str]:
    """One line for each broken rule, then one for each group of flags that no version of this server will take."""
    lines = [f"{rule.name}: {_named(rule, case)}: {rule.limit}. {_advice(rule, case)}" for rule in broken_rules(case)]
    return lines + _unsupported(case, never=True)


def unbuilt(case: Case) -> list[str]:
    """One line for each reason why values that break no rule cannot be served yet."""
    return _unsupported(case, never=False)


def _unsupported(case: Case, *, never: bool) -> list[str]:
    """Flags of one reason share a line."""
    refused = [one for one in _configuration() if not one.is_supported(case[one.name])]
    chosen = [one for one in refused if one.meta.get("never", False) is never]
    return [
        f"{_list(flags, case)} {'are' if len(flags) > 1 else 'is'} not supported{'' if never else ' yet'}: {why}. "
        f"Fix: {' '.join(one.meta.get('instead') or _spell(one.name, one.default) for one in flags)}"
        for why, flags in _by_reason(chosen).items()
    ]


def _by_reason(flags: Iterable[Flag]) -> dict[str, list[Flag]]:
    groups: dict[str, list[Flag]] = {}
    for one in flags:
        groups.setdefault(one.meta["why"], []).append(one)
    return groups


def _configuration() -> Iterable[Flag]:
    return (one for one in FLAGS.values() if one.section != "launch")


def _list(flags: Iterable[Flag], case: Case) -> str:
    return ", ".join(_told(one.name, case) for one in flags)


def warnings(case: Case) -> list[str]:
    """One line for each rule that only warns, then one for each reason why flags change nothing here."""
    rules = [rule for rule in RULES if rule.is_warning and rule.broken(case)]
    named = {name for rule in rules for name in rule.flags}
    lines = [f"{rule.name}: {_named(rule, case)}: {rule.limit}" for rule in rules]
    idle = _by_reason(one for one in _configuration() if one.name not in named and one.is_idle(case[one.name]))
    return lines + [
        f"{_list(flags, case)} {'have' if len(flags) > 1 else 'has'} no effect here: {why}"
        for why, flags in idle.items()
    ]


def _told(name: str, case: Case) -> str:
    return f"{FLAGS[name].spell(case[name])} ({case.sources.get(name, 'default')})"


def _named(rule: Rule, case: Case) -> str:
    return ", ".join(_told(name, case) for name in rule.flags)


def _advice(rule: Rule, case: Case) -> str:
    return "Fix: " + " ".join(_spell(name, value) for name, value in smallest_fix(rule, case).items())


def _spell(name: str, value: Any) -> str:
    return f"leave out --{name}" if value is None else FLAGS[name].spell(value)
