"""Sampling on a real, tiny model: what a request asks for is a function of its own tokens, whatever runs beside it."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import tiny_checkpoint

from xllm_cli import LLM
from xllm_cli.core import SamplingParams

MIB = 1 << 20
PAGE = 64 << 10
BLOCK_BYTES = 16 * 768  # 3 layers, k and v, 2 heads of 16, float32
FLAGS = {
    "dtype": "float32",
    "block_size": 16,
    "enable_vmm_kvcache": True,
    "vmm_elastic": True,
    "host_page_mode": "4k",
    "phy_page_granularity_size": PAGE,
    "max_cache_size": 16 * MIB,
}


def make(**flags: Any) -> LLM:
    return LLM(tiny_checkpoint("llama"), **{**FLAGS, **flags})


def greedy(count: int, **wanted: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **wanted)


def prompts(count: int, length: int) -> list[list[int]]:
    return [[(17 * i + 3 * j) % 250 for j in range(length)] for i in range(count)]


def test_a_strong_frequency_penalty_repeats_nothing():
    with make() as llm:
        free, strict = llm.generate(
            [[1, 2, 3]] * 2, [greedy(60), greedy(60, frequency_penalty=2.0, logit_bias=((7, -100.0),))]
        )
    assert len(set(strict.token_ids)) > len(set(free.token_ids))
    assert 7 not in strict.token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalties_survive_preemption_and_company(temperature: float):
    load = prompts(12, 60)
    wanted = SamplingParams(
        max_tokens=40, temperature=temperature, ignore_eos=True, seed=3, presence_penalty=0.7, frequency_penalty=0.4,
        repetition_penalty=1.3, min_p=0.02,
    )  # fmt: skip
    with make(enable_prefix_cache=False) as llm:
        alone = [llm.generate([prompt], wanted)[0].token_ids for prompt in load[::4]]
    with make(max_cache_size=12 * 7 * BLOCK_BYTES // 3) as llm:
        tight = [answer.token_ids for answer in llm.generate(load, wanted)]
        assert llm.snapshot.counters.preemptions > 0
    assert tight[::4] == alone
