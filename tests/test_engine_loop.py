"""When the loop steps, sleeps and looks at memory."""

from __future__ import annotations

import time

from checkpoints import tiny_checkpoint

from xllm_cli import LLM
from xllm_cli.core import Request, SamplingParams
from xllm_cli.vmm.driver import open_driver

MIB = 1 << 20
FLAGS = {
    "dtype": "float32",
    "block_size": 16,
    "enable_vmm_kvcache": True,
    "vmm_elastic": True,
    "max_cache_size": 16 * MIB,
}


def submit(llm: LLM, name: str, prompt: list[int], max_tokens: int) -> None:
    wanted = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    assert llm.engine.submit(Request(request_id=name, prompt_ids=prompt, sampling=wanted)) is None


def test_the_next_request_gets_a_free_slot_without_a_pause():
    with LLM(tiny_checkpoint("llama"), max_seqs_per_batch=1, **FLAGS) as llm:
        for number in range(4):
            submit(llm, str(number), [number] * 8, 2)
        while llm.engine.has_work:
            assert llm.engine.seconds_until_due() == 0.0 or llm.snapshot.counters.steps == 0
            llm.engine.step()


def test_while_the_head_of_the_queue_waits_for_memory_the_loop_rests():
    driver = open_driver("cpu", mode="4k", total_bytes=256 * MIB)
    llm = LLM(tiny_checkpoint("llama"), driver=driver, vmm_memory_reserve_bytes=300 * MIB, **FLAGS)
    submit(llm, "waits", [1] * 8, 2)
    llm.engine.step()
    assert llm.engine.seconds_until_due() == 0.05
    llm.engine.abort("waits")
    assert llm.engine.seconds_until_due() is None
    assert llm.close()


def test_an_idle_engine_sees_a_neighbour_and_gives_its_cached_pages_back():
    driver = open_driver("cpu", mode="4k", page_bytes=65536, total_bytes=128 * MIB)
    with LLM(tiny_checkpoint("llama"), driver=driver, phy_page_granularity_size=65536, **FLAGS) as llm:
        llm.generate([[1] * 400], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        before = llm.memory()
        neighbour = driver.create((driver.info().free - 60 * MIB) // 65536)  # 64 MiB must stay free
        deadline = time.monotonic() + 30
        while llm.memory()["kv_cached"] and time.monotonic() < deadline:
            llm.idle()
        after = llm.memory()
        driver.destroy(neighbour)
    assert before["kv_cached"] > 0
    assert (after["kv_cached"], after["physical"]) == (0, 0)
    assert after["free"] < before["free"]


def test_all_that_waited_without_memory_are_refused_without_waiting_in_turn():
    driver = open_driver("cpu", mode="4k", total_bytes=256 * MIB)
    flags = {**FLAGS, "vmm_memory_reserve_bytes": 300 * MIB, "memory_wait_seconds": 1}
    llm = LLM(tiny_checkpoint("llama"), driver=driver, **flags)
    started = time.monotonic()
    answers = llm.generate([[1] * 8] * 20, SamplingParams(max_tokens=2))
    assert {answer.error.code for answer in answers} == {"kv_memory_unavailable"}
    assert 1 <= time.monotonic() - started < 15
    assert llm.close()
