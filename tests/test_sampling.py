"""Sampling on a real, tiny model: what a request asks for is a function of its own tokens, whatever runs beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
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


# --- log probabilities of prompts


def scored(llm: LLM, prompt: list[int], count: int, **wanted: Any) -> Any:
    return llm.generate([prompt], greedy(count, logprobs=3, prompt_logprobs=3, **wanted))[0]


def expected(prompt: list[int]) -> list[tuple[float, list[int]]]:
    """transformers' log probability of every token but the first, and the three likeliest in its place."""
    model = transformers.LlamaForCausalLM.from_pretrained(tiny_checkpoint("llama"), dtype=torch.float32).eval()
    with torch.no_grad():
        logs = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    return [(float(line[token]), line.topk(3).indices.tolist()) for line, token in zip(logs, prompt[1:], strict=False)]


@pytest.mark.parametrize("length", [2, 16, 17, 70])
def test_a_prompts_log_probabilities_are_transformers(length: int):
    prompt = prompts(1, length)[0]
    with make(max_tokens_per_chunk_for_prefill=13) as llm:
        answer = scored(llm, prompt, 1)
    assert [s.token_id for s in answer.prompt_logprobs] == prompt[1:]
    for seen, (value, top) in zip(answer.prompt_logprobs, expected(prompt), strict=True):
        assert seen.logprob == pytest.approx(value, abs=1e-4)
        assert [token for token, _ in seen.top] == top


def test_scoring_needs_no_new_token_and_the_whole_context():
    with make() as llm:
        for length in (1, 2, 512):
            answer = scored(llm, [5] * length, 0)
            assert (answer.finish_reason, answer.token_ids) == ("length", [])
            assert len(answer.prompt_logprobs) == length - 1
        assert llm.generate([[5] * 513], greedy(0, prompt_logprobs=0))[0].error.code == "context_length_exceeded"
        assert llm.memory()["kv_live"] == 0


def test_a_cached_prompt_is_scored_all_the_same():
    prompt = prompts(1, 100)[0]
    with make() as llm:
        first, again = scored(llm, prompt, 4), scored(llm, prompt, 4)
        assert llm.generate([prompt], greedy(1))[0].cached_tokens == 96
        llm.engine.check()
    assert (again.prompt_logprobs, again.token_ids) == (first.prompt_logprobs, first.token_ids)
    assert again.cached_tokens == 0


@pytest.mark.parametrize("flags", [{}, {"enable_chunked_prefill": False, "max_tokens_per_batch": 600}])
def test_scores_survive_preemption_and_are_told_once(flags: dict[str, Any]):
    load = prompts(12, 100)
    with make() as llm:
        alone = [scored(llm, prompt, 30) for prompt in load[::4]]
    with make(max_cache_size=12 * 9 * BLOCK_BYTES // 3, **flags) as llm:
        tight = llm.generate(load, greedy(30, logprobs=3, prompt_logprobs=3))
        assert llm.snapshot.counters.preemptions > 0
        llm.engine.check()
    assert [a.prompt_logprobs for a in tight[::4]] == [a.prompt_logprobs for a in alone]
    assert [a.logprobs for a in tight[::4]] == [a.logprobs for a in alone]
