"""More work than memory: a long queue over a small pool is served in order, and every size of block has a place."""

from __future__ import annotations

import random

import pytest
from cache_ops import Clock, FakeRanks, make_cache, spec_of
from driver_kinds import open_kind, peek, poke

from xllm_cli.core import Request, SamplingParams, StepResult, TokenLogprob
from xllm_cli.engine.scheduler import Scheduler, StepLimits
from xllm_cli.engine.sequence import Sequence
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.pool import PagePool

REQUESTS = 8_000


def test_a_batch_far_larger_than_the_pool_is_served_in_order_of_arrival() -> None:
    clock, rng = Clock(), random.Random(1)
    cache = make_cache(spec_of(48), pages=40, spare_pages=4, options={"clock": clock})
    ranks = FakeRanks(cache.page_bytes)
    cache.observe(ranks.observe())
    scheduler = Scheduler(cache, StepLimits(tokens=256, sequences=32, chunk=16, prefill=None))
    wanted = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for number in range(1, REQUESTS + 1):
        prompt = [rng.randrange(50) for _ in range(rng.choice((1, 3, 9)))]
        request = Request(request_id=str(number), prompt_ids=prompt, sampling=wanted)
        scheduler.add(Sequence(number, request, cache.open(), 1, 0))
    served: list[int] = []
    for _ in range(REQUESTS):
        plan = scheduler.plan(clock.now)
        mapped, stuck = ranks.apply(plan.delta)
        tokens = tuple(TokenLogprob(7, 0.0) for row in plan.rows if row.sampling is not None)
        result = StepResult(
            step=plan.step, mapped=mapped, observation=ranks.observe(), tokens=tokens, stuck=tuple(stuck)
        )
        served += [int(output.request_id) for output in scheduler.commit(plan, result)]
        clock.now += 0.01
        if len(served) == REQUESTS:
            break
    assert sorted(served) == list(range(1, REQUESTS + 1)), "a request was lost or served twice"
    assert all(abs(number - place) < 64 for place, number in enumerate(served)), "somebody was overtaken for long"
    cache.check()


@pytest.mark.parametrize(("kind", "page"), [("small", 4096), ("host-4k", 2 << 20)])
@pytest.mark.parametrize("part", ["one byte", "half", "one", "one and a bit", "three"])
def test_an_arena_of_any_size_has_whole_pages(kind: str, page: int, part: str) -> None:
    nbytes = {"one byte": 1, "half": page // 2, "one": page, "one and a bit": page + 1, "three": 3 * page}[part]
    driver = open_kind(kind, pages=4)
    pool = PagePool(driver, page_bytes=page)
    arena = Arena(driver, pool, nbytes)
    assert arena.num_pages == -(-nbytes // page) and arena.nbytes % page == 0
    pages = range(arena.num_pages)
    arena.map(pages, pool.take(len(pages)) or [])
    poke(arena.address + nbytes - 1, b"x")
    assert peek(arena.address + nbytes - 1, 1) == b"x"
    assert driver.usage()["vmas"] <= 3, "one run of pages, whatever the size"
    pool.give(arena.unmap(pages)[0])
    assert arena.close() and pool.trim() == len(pages)
