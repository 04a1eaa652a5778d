"""A limit on a physical cache: its memory stays, but requests use no more than the limit of it."""

from __future__ import annotations

import time

from cache_ops import make_cache, spec_of
from checkpoints import tiny_checkpoint

from xllm_cli import LLM
from xllm_cli.core import Observation, SamplingParams

WIDTH = 64
BLOCK_BYTES = 16 * 768


def test_blocks_in_use_stay_below_the_limit():
    caps = {"elastic": False, "arena_bytes": 10 * WIDTH, "pool_bytes": 10 * WIDTH}
    cache = make_cache(spec_of(WIDTH), page_bytes=None, limits=caps)
    cache.observe(Observation(total=1 << 20, free=1 << 20))
    old, young = cache.open(), cache.open()
    assert cache.grow(old, 12) and cache.grow(young, 12)  # 3 blocks each
    cache.set_limit(7 * WIDTH)
    assert (cache.over_limit_bytes(), cache.fits(1), cache.fits(2)) == (0, True, False)
    assert cache.grow(old, 16) and not cache.grow(young, 16)
    cache.set_limit(4 * WIDTH)
    assert cache.over_limit_bytes() == 3 * WIDTH
    cache.release(young)
    assert (cache.over_limit_bytes(), cache.fits(1)) == (0, False)
    cache.set_limit(None)
    assert cache.fits(6)
    cache.check()


def test_requests_above_a_lowered_limit_give_way_and_get_the_same_tokens():
    wanted = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [[(17 * i + 3 * j) % 250 for j in range(60)] for i in range(6)]  # 5 blocks each in the end
    with LLM(tiny_checkpoint("llama"), dtype="float32", block_size=16, max_cache_size=64 * BLOCK_BYTES) as llm:
        right = [answer.token_ids for answer in llm.generate(prompts, wanted)]
        llm.engine.set_limit(11 * BLOCK_BYTES)
        started = time.monotonic()
        assert [answer.token_ids for answer in llm.generate(prompts, wanted)] == right
        assert llm.memory()["limit"] == 11 * BLOCK_BYTES
        assert time.monotonic() - started < 30
        llm.engine.check()
