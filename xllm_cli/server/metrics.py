"""GET /metrics: the engine's last snapshot and the server's own instruments in Prometheus' text format.

Every series exists at zero before the engine is ready. `vllm:` names have vLLM's meaning, so that its dashboards and
gateways work unchanged; `xllm:` names are our own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import get_args

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from xllm_cli.core import Counters, LimitedBy, Snapshot, VmmReport
from xllm_cli.server.instruments import ENGINE
from xllm_cli.server.state import ServerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# (name without _total, help, field of core.Counters)
_COUNTERS = (
    ("vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
    ("vllm:num_preemptions", "Requests preempted for want of memory.", "preemptions"),
    ("xllm:prompt_tokens_computed", "Prompt tokens run through the model, without hits.", "prompt_tokens_computed"),
    ("xllm:steps", "Steps executed.", "steps"),
    ("xllm:prefill_chunks", "Chunks of prompts executed.", "prefill_chunks"),
    ("xllm:vmm_pages_mapped", "Pages mapped.", "pages_mapped"),
    ("xllm:vmm_pages_unmapped", "Pages unmapped.", "pages_unmapped"),
    ("xllm:vmm_map_failures", "Page changes that failed and were undone.", "map_failures"),
    ("xllm:exhausted_steps", "Steps broken off for want of execution memory.", "exhausted_steps"),
)
_BYTE_KINDS = (
    "arena", "physical", "mapped", "kv_live", "kv_cached", "kv_idle", "kv_spare", "weights", "free_handles", "parked",
    "state", "anon", "execution_room", "execution_peak", "floor", "reserve", "headroom", "possible", "total", "free",
)  # fmt: skip
_PAGE_STATES = ("mapped", "kv_spare", "free_handles", "parked")
_NOTHING_YET = Snapshot(memory=VmmReport(), counters=Counters())


class Exposition:
    """The text of /metrics for one server."""

    def __init__(self, state: ServerState) -> None:
        self._registry = state.instruments.registry
        self._registry.register(_StateCollector(state))

    def render(self) -> bytes:
        """As of now."""
        return generate_latest(self._registry)


class _StateCollector(Collector):
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._labels = {"model_name": state.model.model_id, "engine": ENGINE}

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        snapshot = self._state.client.snapshot or _NOTHING_YET
        yield from self._requests(snapshot)
        yield from self._capacity(snapshot.memory)
        yield from self._pages(snapshot.memory)
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), getattr(snapshot.counters, field))
            yield counter
        evicted = CounterMetricFamily("xllm:prefix_evictions", "Cached blocks forgotten, by cause.", labels=["cause"])
        evicted.add_metric(["memory"], snapshot.counters.evicted_blocks)
        yield evicted

    def _requests(self, snapshot: Snapshot) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", snapshot.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting to run.", snapshot.num_waiting)
        text = "KV bytes that the queue's head waits for; 0 if it waits for something else."
        yield self._gauge("xllm:waiting_bytes", text, snapshot.waiting_bytes)
        yield self._gauge("xllm:open_http_requests", "Generating HTTP requests open.", self._state.open_requests)
        yield self._gauge("xllm:ready", "1 when requests are taken.", self._state.phase == "ready")
        info = {key: str(self._state.settings["kv_cache"][key]) for key in ("block_size", "enable_prefix_cache")}
        settings = self._state.settings["kv_cache"]
        info |= {
            "cache_dtype": settings["kv_cache_dtype"],
            "gpu_memory_utilization": str(settings["max_memory_utilization"]),
            "enable_prefix_caching": info["enable_prefix_cache"],
        }
        info["num_gpu_blocks"] = str(self._num_blocks(settings["block_size"]))
        family = GaugeMetricFamily("vllm:cache_config_info", "The cache's settings.", labels=[*self._labels, *info])
        family.add_metric([*self._labels.values(), *info.values()], 1)
        yield family

    def _num_blocks(self, block_size: int) -> int:
        ready = self._state.client.ready
        return ready.capacity_tokens // block_size if ready else 0

    def _capacity(self, memory: VmmReport) -> Iterator[Metric]:
        """How full the cache is. The whole is what KV could hold now: its pages and what may still be mapped."""
        room = memory.kv_idle + memory.kv_spare + max(0, memory.headroom)
        whole = memory.kv_live + memory.kv_cached + room
        share = memory.kv_live / whole if whole else 0.0
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "xllm:kv_used_bytes over xllm:kv_admissible_bytes, 0 to 1.", share
        )
        yield self._gauge("xllm:kv_used_bytes", "KV bytes of running requests.", memory.kv_live)
        yield self._gauge("xllm:kv_admissible_bytes", "KV bytes that running requests could have now.", whole)
        per_block = sum(int(tensor["bytes_per_block"]) for tensor in memory.tensors)
        per_token = per_block / self._state.settings["kv_cache"]["block_size"]
        tokens = GaugeMetricFamily(
            "xllm:kv_tokens",
            "KV tokens of running requests (used), of idle prefixes (evictable), and that could be had now.",
            labels=["state"],
        )
        for state, nbytes in (("used", memory.kv_live), ("evictable", memory.kv_cached), ("available", room)):
            tokens.add_metric([state], nbytes // per_token if per_token else 0)
        yield tokens

    def _pages(self, memory: VmmReport) -> Iterator[Metric]:
        yield _family(
            "xllm:vmm_bytes",
            "Bytes by kind, as in GET /vmm; kv_live + kv_cached + kv_idle + kv_spare + weights = mapped.",
            "kind",
            {kind: getattr(memory, kind) for kind in _BYTE_KINDS},
        )
        page = memory.page_bytes or 1
        pages = {state: getattr(memory, state) // page if memory.page_bytes else 0 for state in _PAGE_STATES}
        yield _family("xllm:vmm_pages", "Pages by state, as in GET /vmm.", "state", pages)
        limits = get_args(LimitedBy)
        budget = {limit: memory.budget[limit] for limit in limits if limit in memory.budget}
        yield _family(
            "xllm:vmm_budget_bytes", "Bytes that each limit lets be mapped now.", "limit", budget or {"arena": 0}
        )
        reason = {limit: int(limit == memory.headroom_limited_by) for limit in limits}
        yield _family("xllm:vmm_limit_reason", "1 for the limit that growth meets first.", "limit", reason)
        free = {str(rank["rank"]): rank["free"] for rank in memory.ranks if "rank" in rank}
        yield _family("xllm:device_free_bytes", "Free memory of a rank's device.", "rank", free or {"0": 0})
        stray = {str(rank["rank"]): rank.get("unaccounted", 0) for rank in memory.ranks if "rank" in rank}
        text = "Bytes the system holds for a rank's pool beyond the pool's own count."
        yield _family("xllm:unaccounted_bytes", text, "rank", stray or {"0": 0})
        models = GaugeMetricFamily("xllm:model_state", "1 for the state a model is in.", labels=["model", "state"])
        for model, facts in (memory.models or {self._state.model.model_id: {"state": "loading"}}).items():
            models.add_metric([model, str(facts["state"])], 1)
        yield models

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=list(self._labels))
        gauge.add_metric(list(self._labels.values()), value)
        return gauge


def _family(name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, nbytes in values.items():
        family.add_metric([value], nbytes)
    return family
