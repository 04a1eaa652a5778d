"""What is found again: equal hits on every kind of cache, and never a block that holds another prompt's KV."""

from __future__ import annotations

import random

import pytest
from cache_ops import Clock, FakeRanks, make_cache, run_delta, spec_of
from checkpoints import tiny_checkpoint

from xllm_cli import LLM
from xllm_cli.bench.churn import Churn
from xllm_cli.core import SamplingParams

CYCLES = 10_000
KINDS = {
    "elastic": {"enable_vmm_kvcache": True, "vmm_elastic": True},
    "fixed": {"enable_vmm_kvcache": True, "vmm_elastic": False},
    "physical": {"enable_vmm_kvcache": False},
}


@pytest.mark.parametrize("width", [360 << 10, 2304 << 10, 64 << 10])
def test_hits_are_equal_with_pages_and_without(width: int) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    hits = []
    for kind in ({}, {"fixed": True}, {"physical": True}):
        churn = Churn(width, 8192, seed=seed, **kind)
        churn.run(150)
        churn.drain()
        hits.append((churn.queried, churn.hit))
    assert hits[0] == hits[1] == hits[2] and hits[0][1] > 0


def test_ten_thousand_needles_through_a_cache_turned_over_give_no_wrong_hit() -> None:
    """Every prompt is its haystack, one of a few, with a needle somewhere; blocks remember what was written there."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng, clock = random.Random(seed), Clock()
    cache = make_cache(spec_of(24), pages=24, spare_pages=2, options={"clock": clock})
    ranks = FakeRanks(cache.page_bytes)
    cache.observe(ranks.observe())
    written: dict[int, list[int]] = {}
    haystacks = [[rng.randrange(9) for _ in range(40)] for _ in range(6)]
    for cycle in range(CYCLES):
        tokens = list(rng.choice(haystacks))
        tokens[rng.randrange(len(tokens))] = rng.choice((9, 10 + cycle))
        table = cache.open()
        for index in range(cache.match(table, tokens) // 4):
            assert written[table.blocks[index]] == tokens[: 4 * index + 4], f"cycle {cycle}: a wrong hit"
        fresh = len(table.blocks)
        assert cache.grow(table, len(tokens))
        copies = run_delta(cache, ranks, clock.now).copies
        written |= {target: written[source] for source, target in copies}
        for index in range(fresh, len(table.blocks)):
            written[table.blocks[index]] = tokens[: 4 * index + 4]
        cache.publish(table, tokens, len(tokens))
        cache.release(table)
        clock.now += rng.choice((0.004, 0.004, 1.5))
        if rng.random() < 0.02:
            cache.forget_bytes(rng.choice((64, 640)))
    counters = cache.counters
    assert counters.prefix_hits > CYCLES and counters.evicted_blocks > 3 * cache.num_blocks


def test_real_kv_of_needles_answers_as_if_nothing_had_been_cached() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    haystacks = [[rng.randrange(250) for _ in range(70)] for _ in range(3)]
    prompts = []
    for _ in range(60):
        prompt = list(rng.choice(haystacks))
        prompt[rng.randrange(8, 70)] = rng.randrange(250)
        prompts.append(prompt)
    wanted = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    small = {"dtype": "float32", "block_size": 16, "phy_page_granularity_size": 64 << 10, "max_cache_size": 1 << 20}
    answers, counters = [], []
    for flags in (
        {**KINDS["elastic"], **small},
        {**KINDS["fixed"], **small},
        {**KINDS["physical"], "dtype": "float32", "enable_prefix_cache": False},
    ):
        with LLM(tiny_checkpoint("llama"), **flags) as llm:
            answers.append([llm.generate([prompt], wanted)[0].token_ids for prompt in prompts])
            if flags.get("enable_prefix_cache", True):
                counters.append(llm.engine.snapshot().counters)
    assert answers[0] == answers[1] == answers[2]
    elastic, fixed = counters
    assert elastic.prefix_cache_hits == fixed.prefix_cache_hits > 60 * 16 and elastic.evicted_blocks > 0, counters
