"""A device that others use, too: starts, sizes and shortages that ended servers of this kind, and must not end ours."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from checkpoints import tiny_checkpoint
from simulated import FLAGS, MIB, PAGE, Accelerator

from xllm_cli import LLM
from xllm_cli.config import make_config
from xllm_cli.core import CacheSpec, SamplingParams, TensorSpec
from xllm_cli.engine.sizes import size_cache
from xllm_cli.vmm.driver import open_driver
from xllm_cli.vmm.simulated import SimulatedDriver

SMALL = 4 * MIB
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def prompts(count: int, length: int) -> list[list[int]]:
    return [[(17 * i + 3 * j) % 250 for j in range(length)] for i in range(count)]


# --- starting beside others


def test_engines_start_together_while_another_serves():
    driver = SimulatedDriver(open_driver("cpu", mode="4k", page_bytes=PAGE), total_bytes=256 * MIB)

    def serve(number: int) -> list[int]:
        with LLM(tiny_checkpoint("llama"), driver=driver, **FLAGS) as llm:
            return llm.generate(prompts(1, 40), SamplingParams(max_tokens=4, **GREEDY))[0].token_ids

    with LLM(tiny_checkpoint("llama"), driver=driver, **FLAGS) as first, ThreadPoolExecutor(4) as threads:
        others = [threads.submit(serve, number) for number in range(4)]
        right = [answer.token_ids for answer in first.generate(prompts(1, 40), SamplingParams(max_tokens=4, **GREEDY))]
        assert [other.result(timeout=60) for other in others] == right * 4
    assert driver.info().free == 256 * MIB


def test_memory_that_a_peer_frees_during_the_start_does_not_end_it(monkeypatch):
    accelerator = Accelerator(SMALL)
    accelerator.device.peer = 2 * MIB
    accelerator.device.before("create", 1, -2 * MIB)
    with accelerator.serve(monkeypatch) as llm:
        assert llm.memory()["free"] > 3 * MIB


@pytest.mark.parametrize("foreign", [0.0, 0.3, 0.9])
def test_a_fixed_pool_takes_what_is_free_less_what_must_stay_free_and_counts_nobody_twice(foreign: float):
    driver = SimulatedDriver(open_driver("cpu", mode="4k", page_bytes=PAGE), total_bytes=1000 * PAGE)
    driver.peer = round(foreign * 1000) * PAGE
    spec = CacheSpec(16, (TensorSpec("kv", 1024),))
    config = make_config(enable_vmm_kvcache=True, max_memory_utilization=0.95)
    assert size_cache(config, spec, driver.info(), is_host=False).pool_pages == round((0.95 - foreign) * 1000)


# --- a full device


def test_a_fixed_size_of_the_cache_does_not_eat_the_room_of_execution(monkeypatch):
    accelerator = Accelerator(SMALL)
    accelerator.script([MIB])
    with accelerator.serve(monkeypatch, max_cache_size=SMALL) as llm:
        answers = llm.generate(prompts(30, 300), SamplingParams(max_tokens=30, **GREEDY))
        counters = llm.snapshot.counters
    assert [len(answer.token_ids) for answer in answers] == [30] * 30
    assert (accelerator.allocator.num_failures, counters.exhausted_steps) == (0, 0)


def test_a_spike_as_of_a_graph_capture_shrinks_a_full_cache_instead_of_ending_the_engine(monkeypatch):
    accelerator = Accelerator(SMALL)
    wanted = SamplingParams(max_tokens=12, **GREEDY)
    with accelerator.serve(monkeypatch) as llm:
        right = [answer.token_ids for answer in llm.generate(prompts(14, 400), wanted)]
        full = llm.memory()
        accelerator.script([MIB])
        assert [answer.token_ids for answer in llm.generate(prompts(14, 400), wanted)] == right
        llm.engine.check()
        memory, counters = llm.memory(), llm.snapshot.counters
    assert full["free"] < MIB
    assert 0 < counters.exhausted_steps == accelerator.allocator.num_failures <= 4
    assert memory["execution_peak"] >= MIB
    assert memory["mapped"] <= SMALL - MIB


def test_memory_queries_do_not_grow_with_what_is_allocated(monkeypatch):
    accelerator = Accelerator(16 * MIB)
    with accelerator.serve(monkeypatch) as llm:
        wanted = SamplingParams(max_tokens=20, **GREEDY)
        llm.generate(prompts(16, 100), wanted)  # everything is mapped by now
        host = accelerator.host
        host.reset_counts()
        before = llm.snapshot.counters
        llm.generate(prompts(16, 100), wanted)
        steps, counts = llm.snapshot.counters.steps - before.steps, host.counts()
    # one before and one after each step, and one under the lock for each batch created; none for 112 blocks taken
    assert counts["info"] <= 2 * steps + counts["create"]
    assert counts["create"] <= 2


def test_a_shortage_that_lasts_is_told_once(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "xllm.engine")
    accelerator = Accelerator(SMALL)
    with accelerator.serve(monkeypatch, memory_wait_seconds=0.5) as llm:
        accelerator.device.before("create", 1, SMALL)
        caplog.clear()
        answers = llm.generate(prompts(3, 300), SamplingParams(max_tokens=4, **GREEDY))
        steps = llm.snapshot.counters.steps
    assert {answer.error.code for answer in answers} == {"kv_memory_unavailable"}
    assert steps > 10
    told = [message for message in caplog.messages if "bytes" in message]
    assert 1 <= len(told) <= 4, told
    assert any("could not map its pages" in message for message in told)
    assert any("limited by free_memory" in message and "free 0 - floor 0" in message for message in told)
