"""What /metrics shows: every name at zero from the start, names as Prometheus wants them, numbers that add up."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_app import app_of, call, local_state, make_ready
from prometheus_client.parser import text_string_to_metric_families

from xllm_cli.core import Counters, Request, SamplingParams, Snapshot, VmmReport
from xllm_cli.server.instruments import Timeline
from xllm_cli.server.metrics import Exposition
from xllm_cli.server.state import ServerState

GIB = 1 << 30
MEMORY = VmmReport(
    page_bytes=1 << 21, mapped=4 * GIB, kv_live=GIB, kv_cached=GIB, kv_idle=GIB, kv_spare=GIB // 2, weights=GIB // 2,
    headroom=GIB // 2, headroom_limited_by="free_memory", budget={"arena": GIB, "free_memory": GIB // 2},
    ranks=[{"rank": 0, "free": 7}], models={"tiny": {"state": "awake"}},
    tensors=[{"name": "k", "bytes_per_block": 1 << 20}, {"name": "v", "bytes_per_block": 1 << 20}],
)  # fmt: skip
# What vLLM's dashboards and gateways read, and ours; histograms by their count.
NAMES = """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:prefix_cache_queries_total
vllm:prefix_cache_hits_total vllm:prompt_tokens_total vllm:generation_tokens_total vllm:request_success_total
vllm:num_preemptions_total vllm:time_to_first_token_seconds_count vllm:inter_token_latency_seconds_count
vllm:time_per_output_token_seconds_count vllm:e2e_request_latency_seconds_count vllm:request_queue_time_seconds_count
vllm:request_prefill_time_seconds_count vllm:request_decode_time_seconds_count
vllm:request_inference_time_seconds_count vllm:request_prompt_tokens_count vllm:request_generation_tokens_count
vllm:request_params_n_count vllm:request_params_max_tokens_count vllm:iteration_tokens_total_count
vllm:cache_config_info xllm:vmm_bytes xllm:vmm_pages xllm:vmm_budget_bytes xllm:vmm_limit_reason
xllm:vmm_pages_mapped_total xllm:vmm_pages_unmapped_total xllm:vmm_map_failures_total xllm:prefix_evictions_total
xllm:kv_tokens xllm:admission_waits_total xllm:model_state xllm:device_free_bytes xllm:unaccounted_bytes
xllm:model_paused xllm:vmm_map_seconds_count xllm:sleep_seconds_count xllm:wake_seconds_count http_requests_total
"""


@pytest.fixture
def state(tmp_path: Path) -> Iterator[ServerState]:
    with local_state(tmp_path) as made:
        yield made


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Name → labels → value."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def by(text: str, name: str, label: str) -> dict[str, float]:
    return {dict(labels)[label]: value for labels, value in samples(text)[name].items()}


def test_every_series_is_there_from_the_start(state: ServerState) -> None:
    text = call(app_of(state), "/metrics").text
    found = samples(text)
    assert not [name for name in NAMES.split() if name not in found]
    constant = {"vllm:cache_config_info", "xllm:vmm_limit_reason", "xllm:model_state"}
    assert all(value == 0 for name in set(NAMES.split()) - constant for value in found[name].values())
    assert set(by(text, "vllm:request_success_total", "finished_reason")) == {"stop", "length", "abort", "error"}
    assert by(text, "http_requests_total", "handler")["/v1/messages"] == 0
    assert not any(name.endswith("_created") for name in found)
    told = [line.split(" ", 3)[3] for line in text.splitlines() if line.startswith("# HELP xllm:")]
    assert not [
        words for words in told if words.startswith("The same") or words in ("Bytes by kind.", "Pages by state.")
    ]


def test_no_series_appears_later(state: ServerState, tmp_path: Path) -> None:
    exposition = Exposition(state)
    before = set(samples(exposition.render().decode()))
    make_ready(state, tmp_path)
    state.client.snapshot = Snapshot(memory=MEMORY, counters=Counters(steps=3, generation_tokens=5))
    timeline = Timeline(state.instruments.first, request(max_tokens=4), time.monotonic())
    timeline.heard(2, 0.0)
    timeline.ended("stop", 2)
    assert set(samples(exposition.render().decode())) == before


def test_promtool_finds_only_what_the_names_of_others_bring(state: ServerState) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        assert not os.environ.get("CI"), "promtool is missing: install prometheus"
        pytest.skip("promtool is not installed")
    text = Exposition(state).render()
    ran = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=30)
    lines = ran.stderr.decode().splitlines()
    unexpected = [line for line in lines if line and "should not contain ':'" not in line]
    assert unexpected == ['vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix']


def test_usage_is_over_what_could_be_had_now(state: ServerState, tmp_path: Path) -> None:
    exposition = Exposition(state)
    make_ready(state, tmp_path)
    state.client.snapshot = Snapshot(memory=MEMORY, counters=Counters())
    text = exposition.render().decode()
    tokens = by(text, "xllm:kv_tokens", "state")
    assert by(text, "xllm:kv_admissible_bytes", "engine") == {"0": 4 * GIB}  # live, cached, idle, spare and headroom
    assert by(text, "vllm:kv_cache_usage_perc", "engine") == {"0": 0.25}
    assert tokens == {"used": 512 * 128, "evictable": 512 * 128, "available": 1024 * 128}
    assert by(text, "xllm:vmm_pages", "state") == {"mapped": 2048, "kv_spare": 256, "free_handles": 0, "parked": 0}
    assert by(text, "xllm:vmm_budget_bytes", "limit") == {"arena": GIB, "free_memory": GIB // 2}
    reason = by(text, "xllm:vmm_limit_reason", "limit")
    assert [name for name, value in reason.items() if value] == ["free_memory"]


def request(max_tokens: int | None) -> Request:
    return Request(request_id="r", prompt_ids=[1] * 7, sampling=SamplingParams(max_tokens=max_tokens))


def test_a_sequence_leaves_its_times(state: ServerState) -> None:
    exposition = Exposition(state)
    timeline = Timeline(state.instruments.first, request(max_tokens=20), time.monotonic() - 10)
    time.sleep(0.05)
    timeline.heard(0, None)
    timeline.heard(1, 0.01)
    time.sleep(0.02)
    timeline.heard(2, None)
    timeline.ended("length", 3)
    found = samples(exposition.render().decode())
    total = {name: next(iter(found[f"vllm:{name}"].values())) for name in (
        "time_to_first_token_seconds_sum", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum",
        "inter_token_latency_seconds_count", "request_decode_time_seconds_sum", "request_inference_time_seconds_sum",
        "e2e_request_latency_seconds_sum", "prompt_tokens_total", "request_generation_tokens_sum",
    )}  # fmt: skip
    assert total["time_to_first_token_seconds_sum"] > 10 and total["e2e_request_latency_seconds_sum"] > 10.05
    assert total["request_prefill_time_seconds_sum"] == 0.01 and total["request_queue_time_seconds_sum"] >= 0.04
    assert total["inter_token_latency_seconds_count"] == 2 and total["request_decode_time_seconds_sum"] >= 0.02
    assert total["request_inference_time_seconds_sum"] >= 0.03
    assert (total["prompt_tokens_total"], total["request_generation_tokens_sum"]) == (7, 3)


def test_a_sequence_that_never_ran_leaves_only_its_end(state: ServerState) -> None:
    Timeline(state.instruments.first, request(max_tokens=None), time.monotonic()).ended("error", 0)
    text = Exposition(state).render().decode()
    assert by(text, "vllm:request_success_total", "finished_reason")["error"] == 1
    assert set(by(text, "vllm:e2e_request_latency_seconds_count", "engine").values()) == {0}


def test_steps_and_waits_are_read_from_snapshots(state: ServerState) -> None:
    for computed, waiting_for in ((10, ""), (10, "memory"), (14, "memory"), (14, ""), (15, "a slot")):
        counters = Counters(prompt_tokens_computed=computed, generation_tokens=1)
        state.instruments.step(Snapshot(memory=VmmReport(), counters=counters, waiting_for=waiting_for))
    text = Exposition(state).render().decode()
    assert by(text, "vllm:iteration_tokens_total_sum", "engine") == {"0": 16}
    assert by(text, "vllm:iteration_tokens_total_count", "engine") == {"0": 3}
    waits = {"memory": 1, "execution memory": 0, "a slot": 1, "a step": 0}
    assert by(text, "xllm:admission_waits_total", "reason") == waits
