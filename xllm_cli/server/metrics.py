"""GET /metrics: the engine's last snapshot and the server's own instruments in Prometheus' text format.

Every series exists at zero before the engine is ready, those of a forked model from then on until it is removed.
`vllm:` names have vLLM's meaning, so that its dashboards and gateways work unchanged; `xllm:` names are our own. What
is the server's and not a model's, but has a `model_name` all the same, has the first model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from xllm_cli.core import Counters, LimitedBy, ModelActivity, Snapshot, VmmReport
from xllm_cli.server.instruments import ENGINE, LABELS, activity_of
from xllm_cli.server.served import ServedModel
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

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        snapshot = self._state.client.snapshot or _NOTHING_YET
        nothing = ModelActivity(counters=Counters())
        activities = {model.model_id: activity_of(snapshot, model.model_id) or nothing for model in self._state.models}
        yield from self._requests(activities)
        yield from self._server()
        yield from self._capacity(snapshot.memory)
        yield from self._pages(snapshot.memory)
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for model_id, activity in activities.items():
                counter.add_metric([model_id, ENGINE], getattr(activity.counters, field))
            yield counter
        evicted = CounterMetricFamily("xllm:prefix_evictions", "Cached blocks forgotten, by cause.", labels=["cause"])
        evicted.add_metric(["memory"], snapshot.counters.evicted_blocks)
        yield evicted

    def _requests(self, activities: dict[str, ModelActivity]) -> Iterator[Metric]:
        def gauge(name: str, text: str, field: str) -> GaugeMetricFamily:
            values = {model_id: float(getattr(activity, field)) for model_id, activity in activities.items()}
            return _by_model(name, text, values)

        yield gauge("vllm:num_requests_running", "Requests in the running batch.", "num_running")
        yield gauge("vllm:num_requests_waiting", "Requests waiting to run.", "num_waiting")
        text = "KV bytes that the queue's head waits for; 0 if it waits for something else."
        yield gauge("xllm:waiting_bytes", text, "waiting_bytes")
        yield gauge("xllm:model_paused", "1 between POST /pause and POST /resume.", "is_paused")

    def _server(self) -> Iterator[Metric]:
        first = self._state.models.first.model_id
        text = "Generating HTTP requests open."
        yield _by_model("xllm:open_http_requests", text, {first: self._state.open_requests})
        yield _by_model("xllm:ready", "1 when requests are taken.", {first: self._state.phase == "ready"})
        settings = self._state.settings["kv_cache"]
        info = {key: str(settings[key]) for key in ("block_size", "enable_prefix_cache")}
        info |= {
            "cache_dtype": settings["kv_cache_dtype"],
            "gpu_memory_utilization": str(settings["max_memory_utilization"]),
            "enable_prefix_caching": info["enable_prefix_cache"],
        }
        names = [*LABELS, *info, "num_gpu_blocks"]
        family = GaugeMetricFamily("vllm:cache_config_info", "The cache's settings.", labels=names)
        for model in self._state.models:
            num_blocks = model.ready.capacity_tokens // settings["block_size"] if model.ready else 0
            family.add_metric([model.model_id, ENGINE, *info.values(), str(num_blocks)], 1)
        yield family

    def _capacity(self, memory: VmmReport) -> Iterator[Metric]:
        """How full the cache is. The whole is what a model's KV could hold now: its own pages in use, and what it may
        still map or have of the idle prefixes of all."""
        room = memory.kv_idle + memory.kv_spare + max(0, memory.headroom)
        used = {model.model_id: self._live_bytes(memory, model) for model in self._state.models}
        whole = {model_id: live + memory.kv_cached + room for model_id, live in used.items()}
        share = {model_id: used[model_id] / most if most else 0.0 for model_id, most in whole.items()}
        text = "xllm:kv_used_bytes over xllm:kv_admissible_bytes, 0 to 1."
        yield _by_model("vllm:kv_cache_usage_perc", text, share)
        yield _by_model("xllm:kv_used_bytes", "KV bytes of running requests.", used)
        yield _by_model("xllm:kv_admissible_bytes", "KV bytes that running requests could have now.", whole)
        per_block = sum(int(tensor["bytes_per_block"]) for tensor in memory.tensors)
        per_token = per_block / self._state.settings["kv_cache"]["block_size"]
        tokens = GaugeMetricFamily(
            "xllm:kv_tokens",
            "KV tokens of the first model's running requests (used), in idle prefixes (evictable), and that it could "
            "have now.",
            labels=["state"],
        )
        live = used[self._state.models.first.model_id]
        for state, nbytes in (("used", live), ("evictable", memory.kv_cached), ("available", room)):
            tokens.add_metric([state], nbytes // per_token if per_token else 0)
        yield tokens

    def _live_bytes(self, memory: VmmReport, model: ServedModel) -> int:
        is_only = len(memory.models) <= 1 and model is self._state.models.first
        return memory.kv_live if is_only else int(memory.models.get(model.model_id, {}).get("kv_live", 0))

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
        for model, facts in (memory.models or {self._state.models.first.model_id: {"state": "loading"}}).items():
            models.add_metric([model, str(facts["state"])], 1)
        yield models


def _by_model(name: str, text: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, text, labels=LABELS)
    for model_id, value in values.items():
        gauge.add_metric([model_id, ENGINE], value)
    return gauge


def _family(name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, nbytes in values.items():
        family.add_metric([value], nbytes)
    return family
