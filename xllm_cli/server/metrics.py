"""GET /metrics: the last snapshot in Prometheus' text format. Owns the names; asks nobody anything.

Every series exists at zero before the engine is ready. `vllm:` names have vLLM's meaning, so that its dashboards and
gateways work unchanged; `xllm:` names are our own.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from xllm_cli.core import Counters, Snapshot, VmmReport
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
    ("xllm:prefix_evictions", "Cached blocks forgotten for want of memory.", "evicted_blocks"),
    ("xllm:vmm_pages_mapped", "Pages mapped.", "pages_mapped"),
    ("xllm:vmm_pages_unmapped", "Pages unmapped.", "pages_unmapped"),
    ("xllm:vmm_map_failures", "Page changes that failed and were undone.", "map_failures"),
)
_BYTE_KINDS = (
    "arena",
    "physical",
    "mapped",
    "kv_live",
    "kv_cached",
    "kv_idle",
    "kv_spare",
    "weights",
    "free_handles",
    "parked",
    "state",
    "anon",
    "execution_room",
    "reserve",
    "headroom",
    "possible",
    "total",
    "free",
)
_NOTHING_YET = Snapshot(memory=VmmReport(), counters=Counters())


def render(state: ServerState) -> bytes:
    """The exposition of this moment."""
    registry = CollectorRegistry()
    registry.register(_StateCollector(state))
    return generate_latest(registry)


class _StateCollector(Collector):
    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        snapshot = self._state.client.snapshot or _NOTHING_YET
        model = self._state.model.model_id
        yield _gauge("vllm:num_requests_running", "Requests in the running batch.", snapshot.num_running, model)
        yield _gauge("vllm:num_requests_waiting", "Requests waiting to run.", snapshot.num_waiting, model)
        yield _gauge(
            "vllm:kv_cache_usage_perc", "KV bytes in use over those possible, 0 to 1.", _usage(snapshot), model
        )
        yield _gauge("xllm:open_http_requests", "Generating HTTP requests open.", self._state.open_requests, model)
        yield _gauge("xllm:ready", "1 when requests are taken.", self._state.phase == "ready", model)
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([model], getattr(snapshot.counters, field))
            yield counter
        memory = GaugeMetricFamily("xllm:vmm_bytes", "Bytes by kind; DESIGN.md has the equations.", labels=["kind"])
        for kind in _BYTE_KINDS:
            memory.add_metric([kind], getattr(snapshot.memory, kind))
        yield memory


def _gauge(name: str, text: str, value: float, model: str) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, text, labels=["model_name"])
    gauge.add_metric([model], value)
    return gauge


def _usage(snapshot: Snapshot) -> float:
    return snapshot.memory.kv_live / snapshot.memory.possible if snapshot.memory.possible else 0.0
