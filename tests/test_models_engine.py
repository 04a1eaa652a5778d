"""Every architecture through the whole engine: chunked, batched, hit or preempted, its tokens are transformers'."""

from __future__ import annotations

import json

import pytest
from checkpoints import tiny_checkpoint

from xllm_cli import LLM
from xllm_cli.core import SamplingParams
from xllm_cli.llm import Completion

NAMES = ["mistral", "qwen2", "qwen3", "gemma3_text"]  # test_parity.py has the Llamas
MIB = 1 << 20
SMALL = {"block_size": 16, "max_tokens_per_chunk_for_prefill": 16, "enable_vmm_kvcache": True, "dtype": "float32"}
PRESSED = {**SMALL, "max_memory_utilization": 0.9, "host_page_mode": "4k", "phy_page_granularity_size": 65536}
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


def oracle(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of 5, 17 and 70 tokens, and the 32 that follow each."""
    found = json.loads((tiny_checkpoint(name) / "oracle.json").read_text())["answers"]
    return [a["prompt"] for a in found], [a["tokens"] for a in found]


def tokens(answers: list[Completion]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_chunked_batched_and_hit(name: str) -> None:
    prompts, expected = oracle(name)
    with LLM(tiny_checkpoint(name), max_cache_size=4 * MIB, vmm_elastic=True, **SMALL) as llm:
        assert tokens(llm.generate(prompts, GREEDY)) == expected
        assert llm.snapshot.counters.prefill_chunks == 1 + 2 + 5
        again = llm.generate(prompts, GREEDY)
        assert tokens(again) == expected
        assert again[2].cached_tokens == 64


@pytest.mark.parametrize("name", NAMES)
def test_tokens_under_preemption(name: str) -> None:
    prompts, expected = oracle(name)
    with LLM(tiny_checkpoint(name), max_cache_size=small_cache(name), **PRESSED) as llm:
        assert tokens(llm.generate(prompts * 4, GREEDY)) == expected * 4
        assert llm.snapshot.counters.preemptions > 0
        llm.engine.check()


def small_cache(name: str) -> int:
    """Bytes for about three of the longest sequences (102 tokens), where twelve want to run."""
    config = json.loads((tiny_checkpoint(name) / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    block = 16 * config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head * 4
    return 3 * 7 * block + 65536
