"""The engine in-process on a tiny checkpoint: what a request may ask for, memory that follows load, shortage."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from checkpoints import tiny_checkpoint

from xllm_cli import LLM
from xllm_cli.cache import residency
from xllm_cli.core import Request, SamplingParams
from xllm_cli.engine import parts
from xllm_cli.models.ops.cpu import CpuOps
from xllm_cli.vmm.driver import open_driver

MIB = 1 << 20
PAGE = 64 << 10
FLAGS = {
    "dtype": "float32",
    "block_size": 16,
    "enable_vmm_kvcache": True,
    "vmm_elastic": True,
    "host_page_mode": "4k",
    "phy_page_granularity_size": PAGE,
    "max_cache_size": 16 * MIB,
}
BLOCK_BYTES = 16 * 768  # 3 layers, k and v, 2 heads of 16, float32


def make(**flags: object) -> LLM:
    return LLM(tiny_checkpoint("llama"), **{**FLAGS, **flags})


def greedy(count: int | None, **wanted: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **wanted)


def prompts(count: int, length: int) -> list[list[int]]:
    return [[(17 * i + 3 * j) % 250 for j in range(length)] for i in range(count)]


def wait_for(llm: LLM, condition: Callable[[dict], bool], seconds: float = 30.0) -> dict:
    """Idle steps until the memory report says so; the last report."""
    deadline = time.monotonic() + seconds
    while not condition(llm.memory()) and time.monotonic() < deadline:
        time.sleep(0.02)
        llm.idle()
    return llm.memory()


# --- what a request may ask for


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code"),
    [
        ([], 4, "invalid_request"),
        ([1, 320], 4, "invalid_request"),
        ([1, -1], 4, "invalid_request"),
        ([1] * 513, 1, "context_length_exceeded"),
        ([1] * 512, 1, "context_length_exceeded"),
        ([1] * 500, 13, "context_length_exceeded"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(prompt, max_tokens, code):
    with make() as llm:
        answer = llm.generate([prompt], greedy(max_tokens))[0]
    assert (answer.finish_reason, answer.error.code, answer.error.status) == ("error", code, 400)


def test_context_is_used_to_its_last_token():
    with make() as llm:
        answers = llm.generate([[1] * 500, [1] * 511, [2] * 509], [greedy(12), greedy(1), greedy(None)])
    assert [len(a.token_ids) for a in answers] == [12, 1, 3]
    assert [a.finish_reason for a in answers] == ["length"] * 3


def test_more_than_memory_could_ever_hold_is_refused_with_the_numbers():
    with make(max_cache_size=4 * PAGE) as llm:  # 21 blocks, 336 tokens
        explicit, clipped = llm.generate([[1] * 200, [1] * 200], [greedy(200), greedy(None)])
        possible = llm.memory()["possible"]
    assert explicit.error.code == "kv_capacity_exceeded"
    assert str(possible) in explicit.error.message
    assert "--max_cache_size" in explicit.error.message
    assert (clipped.finish_reason, len(clipped.token_ids)) == ("length", 337 - 200)


def test_a_prompt_longer_than_a_step_needs_chunking():
    with make(enable_chunked_prefill=False, max_tokens_per_batch=64) as llm:
        long, short = llm.generate([[1] * 65, [1] * 64], greedy(2))
    assert "--enable_chunked_prefill" in long.error.message
    assert len(short.token_ids) == 2


def test_a_request_id_in_use_is_refused_and_the_first_goes_on():
    with make() as llm:
        request = Request(request_id="same", prompt_ids=[1, 2], sampling=greedy(3))
        assert llm.engine.submit(request) is None
        assert llm.engine.submit(request).error.code == "duplicate_id"
        assert len(llm.engine.drain(time.monotonic() + 60)) == 3


def test_seeds_decide_and_unseeded_requests_differ():
    wanted = {"max_tokens": 12, "temperature": 1.5, "ignore_eos": True}
    with make(random_seed=5) as llm:
        seeded = llm.generate([[1, 2, 3]] * 2, SamplingParams(seed=11, **wanted))
        unseeded = llm.generate([[1, 2, 3]] * 2, SamplingParams(**wanted))
    with make(random_seed=5) as llm:
        again = llm.generate([[1, 2, 3]] * 4, SamplingParams(**wanted))
    assert seeded[0].token_ids == seeded[1].token_ids
    assert unseeded[0].token_ids != unseeded[1].token_ids
    assert again[2].token_ids == unseeded[0].token_ids  # the third arrival of either engine


# --- elastic


def test_memory_follows_the_load_and_goes_back_within_a_second():
    driver = open_driver("cpu", mode="4k", page_bytes=PAGE)
    llm = LLM(tiny_checkpoint("llama"), driver=driver, enable_prefix_cache=False, **FLAGS)
    floor = wait_for(llm, lambda m: m["physical"] == 0)
    for number, prompt in enumerate(prompts(32, 100)):
        llm.engine.submit(Request(request_id=str(number), prompt_ids=prompt, sampling=greedy(20)))
    peak, memfds = {"mapped": 0, "physical": 0}, 0
    while llm.engine.has_work:
        memory = llm.engine.step().snapshot.memory
        peak = {key: max(peak[key], getattr(memory, key)) for key in peak}
        memfds = max(memfds, driver.memfd_bytes())
    started = time.monotonic()
    idle = wait_for(llm, lambda m: m["physical"] == 0)
    assert time.monotonic() - started < 10  # a second, with room for a busy machine
    assert (floor["mapped"], idle["mapped"], idle["physical"]) == (0, 0, 0)
    assert driver.memfd_bytes() == 0
    assert peak["mapped"] >= 32 * 7 * BLOCK_BYTES
    assert peak["physical"] == memfds >= peak["mapped"]
    assert llm.close()


def test_emptied_pages_wait_for_the_next_request_however_many_tensors_share_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CpuOps, "kv_layout", "per_layer")  # six tensors
    monkeypatch.setattr(parts, "SPARE_BYTES", PAGE)
    monkeypatch.setattr(residency, "SPARE_SECONDS", 3600.0)
    with make(enable_prefix_cache=False) as llm:
        llm.generate(prompts(8, 100), greedy(4))
        mapped = llm.snapshot.counters.pages_mapped
        llm.generate(prompts(8, 100), greedy(4))
        assert llm.snapshot.counters.pages_mapped == mapped > 0
        assert llm.snapshot.counters.pages_unmapped == 0


def test_cached_prefixes_stay_and_a_repeat_computes_only_the_rest():
    prompt = prompts(1, 450)[0]
    with make() as llm:
        llm.generate([prompt], greedy(4))
        memory = wait_for(llm, lambda m: m["kv_spare"] == 0)
        before = llm.snapshot.counters.prompt_tokens_computed
        again = llm.generate([prompt], greedy(4))[0]
        computed = llm.snapshot.counters.prompt_tokens_computed - before
    assert memory["kv_live"] == 0
    assert memory["kv_cached"] == 28 * BLOCK_BYTES
    assert (again.cached_tokens, computed) == (448, 2)


@pytest.mark.parametrize("mode", ["elastic", "fixed", "physical"])
def test_the_bands_of_every_report_add_up(mode: str):
    virtual = {"elastic": {}, "fixed": {"vmm_elastic": False}, "physical": {"enable_vmm_kvcache": False}}
    flags = {**virtual[mode], "vmm_elastic": mode == "elastic", "max_memory_utilization": 0.9}
    with make(**flags) as llm:
        for number, prompt in enumerate(prompts(12, 90)):
            llm.engine.submit(Request(request_id=str(number), prompt_ids=prompt, sampling=greedy(9)))
        while llm.engine.has_work:
            m = llm.engine.step().snapshot.memory
            assert m.mapped == m.kv_live + m.kv_cached + m.kv_idle + m.kv_spare + m.weights
            assert min(m.kv_live, m.kv_cached, m.kv_idle, m.kv_spare) >= 0
            assert m.physical == m.mapped + m.free_handles + m.parked
            assert m.physical <= m.arena


def test_a_fixed_pool_keeps_its_pages():
    with make(vmm_elastic=False, max_memory_utilization=0.9, max_cache_size=8 * PAGE) as llm:
        before = llm.memory()
        llm.generate(prompts(6, 60), greedy(10))
        after = wait_for(llm, lambda m: m["kv_spare"] == 0)
    assert before["physical"] == after["physical"] == 8 * PAGE


# --- pressure


def test_a_third_of_the_memory_gives_the_same_tokens():
    load = prompts(24, 60)
    with make() as llm:
        free = llm.generate(load, greedy(40))
        peak = 24 * 7 * BLOCK_BYTES
    with make(max_cache_size=peak // 3) as llm:
        tight = llm.generate(load, greedy(40))
        counters = llm.snapshot.counters
        llm.engine.check()
    assert [a.token_ids for a in tight] == [a.token_ids for a in free]
    assert counters.preemptions + counters.evicted_blocks > 0


def test_evicted_prefixes_make_room_for_new_requests():
    with make(max_cache_size=40 * BLOCK_BYTES) as llm:
        for prompt in prompts(8, 200):
            assert len(llm.generate([prompt], greedy(4))[0].token_ids) == 4
        assert llm.snapshot.counters.evicted_blocks > 0
        assert llm.snapshot.counters.preemptions == 0


def test_a_request_alone_without_memory_gets_503_with_the_numbers():
    driver = open_driver("cpu", mode="4k", page_bytes=PAGE, total_bytes=256 * MIB)
    llm = LLM(
        tiny_checkpoint("llama"), driver=driver, memory_wait_seconds=0.2, vmm_memory_reserve_bytes=300 * MIB, **FLAGS
    )
    answer = llm.generate([[1] * 40], greedy(4))[0]
    assert (answer.error.status, answer.error.code) == (503, "kv_memory_unavailable")
    assert "free_memory" in answer.error.message
    assert llm.memory()["headroom_limited_by"] == "free_memory"
    assert not llm.engine.has_work
    assert llm.close()


def test_a_shortage_tells_whole_pages_and_how_to_end_it(caplog):
    caplog.set_level("INFO", "xllm.engine")
    with make(memory_wait_seconds=0.2) as llm:
        llm.engine.set_limit(2 * PAGE - 1)
        answer = llm.generate([[1] * 90], greedy(4))[0]
        told = f"and 0 may be mapped in whole pages: limited by limit (limit {2 * PAGE - 1} - KV {PAGE} - state 0)"
        assert any(told in message for message in caplog.messages), caplog.messages
    assert "0 may be mapped now in whole pages" in answer.error.message
    assert "raise the limit (xllm vmm limit, POST /vmm/limit)" in answer.error.message


def test_abort_returns_blocks_before_the_next_step():
    with make(enable_prefix_cache=False) as llm:
        for number, prompt in enumerate(prompts(4, 100)):
            llm.engine.submit(Request(request_id=str(number), prompt_ids=prompt, sampling=greedy(200)))
        llm.engine.step()
        for number in range(4):
            llm.engine.abort(str(number))
        llm.engine.abort("unknown")
        memory = llm.engine.step().snapshot.memory
        llm.engine.check()
    assert (memory.kv_live, llm.engine.has_work) == (0, False)


# --- old bytes in fresh pages


def test_nan_in_fresh_pages_changes_nothing():
    load = prompts(9, 70)
    answers = []
    for poison in (None, 0xFF):  # 0xFFFF… is NaN in bfloat16 and in float32
        driver = open_driver("cpu", mode="4k", page_bytes=PAGE, poison=poison)
        llm = LLM(tiny_checkpoint("llama"), driver=driver, **FLAGS)
        answers.append([(a.token_ids, a.logprobs) for a in llm.generate(load, greedy(20, logprobs=2))])
        assert llm.close()
    assert answers[0] == answers[1]


# --- what is not mapped is not read


def test_printing_the_cache_reads_no_page():
    driver = open_driver("cpu", mode="4k", page_bytes=PAGE)
    llm = LLM(tiny_checkpoint("llama"), driver=driver, **FLAGS)
    worker = llm.engine._group._worker  # what a traceback or a debugger would print
    assert f"{worker._layers}".startswith("[LayerKV((")
    assert llm.close()
