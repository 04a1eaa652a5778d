"""The scheduler over a real cache manager: who runs, who waits, who gives way. The rank is played by hand."""

from __future__ import annotations

from itertools import count

import pytest

from xllm_cli.cache.budget import Limits
from xllm_cli.cache.manager import CacheManager
from xllm_cli.cache.options import CacheOptions
from xllm_cli.core import (
    CacheSpec,
    Observation,
    Output,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
    TensorSpec,
    TokenLogprob,
)
from xllm_cli.engine.scheduler import Scheduler, StepLimits
from xllm_cli.engine.sequence import Sequence

BLOCK, PAGE = 4, 4096
GIB = 1 << 30


class Rig:
    """A scheduler whose rank maps whatever it is told and always draws token 9; one block is one page."""

    def __init__(self, blocks: int, *, prefix: bool = False, **limits: object) -> None:
        spec = CacheSpec(BLOCK, (TensorSpec("kv", PAGE),))
        caps = Limits(arena_bytes=64 * PAGE, max_cache_size=blocks * PAGE)
        self.now = 0.0
        self.cache = CacheManager(
            spec,
            limits=caps,
            page_bytes=PAGE,
            prefix_seed=1024 if prefix else None,
            spare_pages=0,
            options=CacheOptions(clock=lambda: self.now),
        )
        self.cache.observe(self.observation())
        bounds = {"tokens": 64, "sequences": 8, "chunk": 16, "prefill": None}
        self.scheduler = Scheduler(self.cache, StepLimits(**{**bounds, **limits}))
        self.numbers = count(1)

    def observation(self) -> Observation:
        return Observation(total=GIB, free=GIB)

    def add(self, prompt: int, max_tokens: int = 100, first: int = 0, **wanted: object) -> Sequence:
        number = next(self.numbers)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **wanted)
        ids = [first + i for i in range(prompt)]
        request = Request(request_id=str(number), prompt_ids=ids, sampling=sampling)
        sequence = Sequence(number, request, self.cache.open(), max_tokens, 0)
        self.scheduler.add(sequence)
        return sequence

    def plan(self) -> StepPlan:
        self.now += 0.1
        return self.scheduler.plan(self.now)

    def done(self, plan: StepPlan, *, mapped: bool = True) -> StepResult:
        drawn = tuple(TokenLogprob(9, 0.0) for row in plan.rows if row.sampling is not None)
        return StepResult(step=plan.step, mapped=mapped, observation=self.observation(), tokens=drawn)

    def step(self) -> tuple[dict[int, int], list[Output]]:
        """Tokens run per sequence, and the outputs."""
        plan = self.plan()
        outputs = self.scheduler.commit(plan, self.done(plan))
        self.cache.check()
        return {row.sequence: len(row.token_ids) for row in plan.rows}, outputs


def test_decodes_come_first_then_prefills_then_newcomers():
    rig = Rig(60, tokens=20, chunk=8)
    rig.add(3)
    rig.step()
    rig.add(30)
    rig.step()
    rig.add(5)
    plan = rig.plan()
    assert [(row.sequence, len(row.token_ids)) for row in plan.rows] == [(1, 1), (2, 8), (3, 5)]


def test_a_prompt_is_cut_into_chunks_and_only_the_last_draws():
    rig = Rig(60)
    rig.add(40)
    assert [rig.step() for _ in range(2)] == [({1: 16}, []), ({1: 16}, [])]
    ran, outputs = rig.step()
    assert ran == {1: 8}
    assert outputs[0].token_ids == [9]


def test_prefill_tokens_of_a_step_are_shared():
    rig = Rig(60, prefill=16)
    rig.add(12)
    rig.add(12)
    assert rig.step()[0] == {1: 12, 2: 4}


def test_without_chunking_a_prompt_runs_whole_or_waits():
    rig = Rig(60, chunk=None, tokens=32)
    rig.add(20)
    rig.add(20)
    assert rig.step()[0] == {1: 20}
    assert rig.scheduler.waiting_for == "a step"
    assert rig.step()[0] == {1: 1, 2: 20}


def test_max_sequences_bounds_the_running():
    rig = Rig(60, sequences=2)
    for _ in range(3):
        rig.add(2)
    assert rig.step()[0] == {1: 2, 2: 2}
    assert rig.scheduler.waiting_for == "a slot"


def test_a_short_decode_preempts_the_youngest():
    rig = Rig(5)
    old, young = rig.add(7), rig.add(3)
    for _ in range(6):
        rig.step()  # old holds 3 blocks, young 2
    assert rig.scheduler.running == [old, young]
    rig.step()  # old needs a fourth
    assert rig.scheduler.running == [old]
    assert list(rig.scheduler.waiting) == [young]
    assert (rig.scheduler.totals.preemptions, young.computed, young.table.blocks) == (1, 0, [])


def test_the_youngest_preempts_itself_when_it_is_the_short_one():
    rig = Rig(5)
    old, young = rig.add(5), rig.add(3)
    for _ in range(6):
        rig.step()  # old holds 3 blocks, young 2
    assert rig.scheduler.running == [old, young]
    assert rig.step()[0] == {old.number: 1}  # young needs a third
    assert list(rig.scheduler.waiting) == [young]


def test_a_preempted_sequence_waits_ahead_of_newcomers_and_comes_back_with_its_tokens():
    rig = Rig(5)
    old, young = rig.add(7, max_tokens=9), rig.add(3)
    for _ in range(7):
        rig.step()
    newcomer = rig.add(1)
    assert list(rig.scheduler.waiting) == [young, newcomer]
    assert young.num_generated == 6
    while old in rig.scheduler.running:
        rig.step()
    assert rig.step()[0] == {young.number: 9}
    assert young.num_generated == 7


def test_a_waiting_request_never_preempts_and_is_not_overtaken():
    rig = Rig(6)
    running = rig.add(8)
    rig.step()
    big, small = rig.add(16), rig.add(1)
    rig.step()
    assert rig.scheduler.running == [running]
    assert list(rig.scheduler.waiting) == [big, small]
    assert rig.scheduler.waiting_for == "memory"


def test_admission_counts_what_running_prefills_were_promised():
    rig = Rig(8, chunk=4)
    rig.add(20)  # 5 blocks and one more, taken chunk by chunk
    rig.step()
    second = rig.add(8)  # 2 and one more: 8 in all, but the first has taken only one so far
    rig.step()
    assert second in rig.scheduler.waiting


def test_a_request_that_fills_the_whole_memory_is_admitted():
    rig = Rig(4)
    only = rig.add(13, max_tokens=4)  # 16 positions in 4 blocks: there is no fifth
    assert rig.step()[0] == {only.number: 13}


def test_rollback_puts_everything_back():
    rig = Rig(20)
    old = rig.add(6)
    rig.step()
    new = rig.add(9)
    before = (list(old.table.blocks), old.computed)
    for _ in range(3):
        rig.step()
    plan = rig.plan()
    blocks = len(old.table.blocks), old.computed
    rig.scheduler.rollback(plan, rig.done(plan, mapped=False))
    rig.cache.check()
    assert old.computed == blocks[1]
    assert before[1] < old.computed
    assert new in rig.scheduler.running


def test_rollback_of_an_admission_returns_it_to_the_head_of_the_queue():
    rig = Rig(20)
    first, second = rig.add(6), rig.add(5)
    plan = rig.plan()
    rig.scheduler.rollback(plan, rig.done(plan, mapped=False))
    rig.cache.check()
    assert list(rig.scheduler.waiting) == [first, second]
    assert (first.computed, first.table.blocks) == (0, [])


def test_while_growth_is_closed_rows_that_need_no_page_run_and_nobody_is_preempted():
    rig = Rig(20)
    needs, content = rig.add(8), rig.add(5)
    rig.step()
    rig.cache.close_growth(rig.now + 10)
    assert rig.step()[0] == {content.number: 1}
    assert needs in rig.scheduler.running
    assert rig.scheduler.totals.preemptions == 0


def test_where_only_small_batches_of_pages_are_to_be_had_one_after_another_grows():
    rig = Rig(60)
    wanted = {rig.add(15).number for _ in range(4)}
    ran: set[int] = set()
    for _ in range(40):
        plan = rig.plan()
        result = rig.done(plan, mapped=len(plan.delta.map) <= 4)
        (rig.scheduler.commit if result.mapped else rig.scheduler.rollback)(plan, result)
        rig.cache.check()
        ran |= {row.sequence for row in plan.rows if result.mapped}
    assert ran == wanted


def test_when_nothing_can_run_the_youngest_gives_way():
    rig = Rig(20)
    old, young = rig.add(8), rig.add(8)
    rig.step()
    rig.cache.close_growth(rig.now + 10)
    assert rig.step()[0] == {old.number: 1}
    assert list(rig.scheduler.waiting) == [young]


def test_a_repeated_prompt_computes_only_the_rest():
    rig = Rig(40, prefix=True)
    rig.add(14, max_tokens=1)
    rig.step()
    again = rig.add(14)
    assert rig.step()[0] == {again.number: 2}
    assert again.cached_tokens == 12


def test_a_shared_prefix_is_matched_in_the_same_step_when_asked_for():
    rig = Rig(40, prefix=True, share_in_batch=True)
    rig.add(14)
    rig.add(14)
    assert rig.step()[0] == {1: 14, 2: 2}


def test_a_lowered_limit_preempts_down_to_it():
    rig = Rig(20)
    old, young = rig.add(8), rig.add(8)
    rig.step()
    rig.cache.set_limit(3 * PAGE)
    rig.step()
    assert rig.scheduler.running == [old]
    assert list(rig.scheduler.waiting) == [young]


def test_removing_a_sequence_gives_its_blocks_back_at_once():
    rig = Rig(20)
    gone, waits = rig.add(8), rig.add(8)
    rig.step()
    rig.scheduler.remove(gone)
    rig.scheduler.remove(waits)
    plan = rig.plan()
    assert (len(plan.delta.unmap), plan.rows) == (4, ())


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_stop_tokens_end_a_sequence_once_it_is_long_enough(min_tokens: int):
    rig = Rig(20)
    rig.add(2, stop_token_ids=(9,), min_tokens=min_tokens)
    steps = 0
    while rig.scheduler.running or rig.scheduler.waiting:
        _, outputs = rig.step()
        steps += 1
    assert (steps, outputs[-1].finish) == (min_tokens + 1, "stop")


def test_hits_are_counted_once_although_the_first_try_is_rolled_back():
    rig = Rig(40, prefix=True)
    rig.add(14, max_tokens=1)
    rig.step()
    again = rig.add(14)
    plan = rig.plan()
    rig.scheduler.rollback(plan, rig.done(plan, mapped=False))
    rig.now += 1
    rig.step()
    totals = rig.scheduler.totals
    assert (totals.prefix_queries, totals.prefix_hits, again.cached_tokens) == (28, 12, 12)


def test_what_a_sequence_computed_before_its_preemption_is_no_cached_token():
    rig = Rig(5, prefix=True)
    old, young = rig.add(7, max_tokens=9), rig.add(3, first=50)
    while not rig.scheduler.totals.preemptions:
        rig.step()
    assert young.num_generated > 4  # so that a block of it is cached
    while young in rig.scheduler.waiting:
        rig.step()
    assert old not in rig.scheduler.running
    assert rig.scheduler.totals.prefix_hits > 0
    assert young.cached_tokens == 0


def test_hits_during_a_chunked_prefill_are_cached_tokens_too():
    rig = Rig(60, prefix=True, chunk=8, prefill=8)
    rig.add(40, max_tokens=1)
    rig.step()
    late = rig.add(40)
    while late.num_generated == 0:
        rig.step()
    assert late.cached_tokens == rig.scheduler.totals.prefix_hits > 8


def test_an_output_that_is_not_a_number_ends_its_request_alone():
    rig = Rig(20, prefix=True)
    broken, fine = rig.add(9), rig.add(9, first=50)
    plan = rig.plan()
    drawn = (TokenLogprob(-1, 0.0), TokenLogprob(9, 0.0))
    result = StepResult(step=plan.step, mapped=True, observation=rig.observation(), tokens=drawn)
    outputs = rig.scheduler.commit(plan, result)
    rig.cache.check()
    assert (outputs[0].finish, outputs[0].error.status) == ("error", 500)
    assert (outputs[1].finish, outputs[1].token_ids) == (None, [9])
    assert rig.scheduler.running == [fine]
    again = rig.add(9)
    rig.step()
    assert (broken.table.blocks, again.cached_tokens) == ([], 0)


# --- steps that run out of execution memory


def broken(rig: Rig) -> StepPlan:
    """A plan whose rows had no memory to run."""
    plan = rig.plan()
    result = StepResult(step=plan.step, mapped=True, observation=rig.observation(), exhausted="full")
    rig.scheduler.break_off(plan, result)
    rig.cache.check()
    return plan


def test_a_step_that_ran_out_is_cut_and_the_youngest_gives_way():
    rig = Rig(40)
    old, young = rig.add(20), rig.add(20)
    assert len(broken(rig).rows) == 2
    assert list(rig.scheduler.waiting) == [old, young]  # neither had run before
    assert rig.step()[0] == {old.number: 16}
    assert {row.sequence: len(row.token_ids) for row in broken(rig).rows} == {old.number: 4, young.number: 12}
    assert (old.computed, rig.step()[0]) == (16, {old.number: 4, young.number: 4})


def test_running_decodes_keep_their_order_and_the_youngest_recomputes():
    rig = Rig(40)
    old, young = rig.add(5), rig.add(5)
    rig.step()
    broken(rig)
    assert (rig.scheduler.running, list(rig.scheduler.waiting)) == ([old], [young])
    tokens = []
    while young.num_generated < 3:
        tokens += [output.token_ids for output in rig.step()[1]]
    assert (old.tokens[5:8], young.tokens[5:8]) == ([9] * 3, [9] * 3)


def test_a_single_token_that_never_fits_leaves_its_memory_and_rests():
    rig = Rig(40)
    only = rig.add(1)
    while rig.scheduler.pace.tokens > 1:
        broken(rig)
    broken(rig)
    assert (list(rig.scheduler.waiting), only.table.blocks) == ([only], [])
    rig.now -= 0.1
    assert (rig.plan().rows, rig.scheduler.waiting_for) == ((), "execution memory")
    assert rig.step()[0] == {only.number: 1}


def test_what_a_broken_step_published_in_advance_is_withdrawn():
    rig = Rig(40, prefix=True, share_in_batch=True)
    rig.add(14)
    broken(rig)
    late = rig.add(14, max_tokens=1)
    while late.num_generated == 0:
        rig.step()
    assert rig.scheduler.totals.prefix_hits == late.cached_tokens


# --- nobody starves


def test_a_big_request_runs_under_a_stream_of_small_ones():
    rig = Rig(12, prefix=True)
    for _ in range(3):
        rig.add(8, max_tokens=6, first=20)
    rig.step()
    big, later = rig.add(40, max_tokens=2, first=100), []
    steps = 0
    while big.num_generated == 0:
        later.append(rig.add(3, max_tokens=4, first=3 * steps))
        rig.step()
        steps += 1
        assert steps < 20
    assert all(small.num_generated == 0 for small in later[:-1])
    while later[-1].num_generated == 0:
        rig.step()


def test_a_preempted_request_is_not_overtaken_for_ever():
    rig = Rig(6)
    old, young = rig.add(7, max_tokens=12), rig.add(3, max_tokens=12)
    done: list[str] = []
    while str(young.number) not in done:
        newcomer = rig.add(2, max_tokens=6)
        done += [output.request_id for output in rig.step()[1] if output.finish]
        assert newcomer.number < 40
    assert done[0] == str(old.number)
    assert young.preempted_in_step > 0
    assert len(done) < 6  # only those that ran already when it gave way


def test_what_the_head_waits_for_is_told_in_bytes():
    rig = Rig(6)
    rig.add(8)
    rig.step()
    rig.add(16)  # 4 blocks and one more
    rig.step()
    assert (rig.scheduler.waiting_for, rig.scheduler.short_bytes) == ("memory", 5 * PAGE)
    rig.scheduler.remove(rig.scheduler.running[0])
    rig.step()
    assert (rig.scheduler.waiting_for, rig.scheduler.short_bytes) == ("", 0)
