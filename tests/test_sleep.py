"""A model that sleeps and wakes: the same answers afterwards, its memory elsewhere meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from checkpoints import tiny_checkpoint

from xllm_cli import LLM
from xllm_cli.core import Request, SamplingParams
from xllm_cli.engine.slumber import Bed
from xllm_cli.errors import RequestError
from xllm_cli.vmm.driver import FaultyDriver, open_driver

MIB = 1 << 20
KINDS = {
    "elastic": {"enable_vmm_kvcache": True, "vmm_elastic": True},
    "fixed": {"enable_vmm_kvcache": True},
    "weights alone": {"vmm_elastic": True},
}
BEDS = [Bed(1), Bed(2), Bed(1, park=True)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [[7, 8, 9] * 90, [11] * 20]


def open_llm(kind: str, *, model: str = "llama", **more: object) -> LLM:
    flags = {"enable_vmm_weights": True, "max_cache_size": 16 * MIB, "dtype": "float32", "block_size": 16}
    return LLM(tiny_checkpoint(model), **{**flags, **KINDS[kind], **more})  # type: ignore[arg-type]


def answers(llm: LLM) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(params=KINDS)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    made = open_llm(request.param)
    yield made
    made.engine.check()
    assert made.close()


def test_weights_in_pages_answer_like_ordinary_ones(llm: LLM) -> None:
    with LLM(tiny_checkpoint("llama"), dtype="float32", max_cache_size=16 * MIB) as plain:
        assert answers(llm) == answers(plain)
    memory = llm.memory()
    assert memory["weights"] > 0 and memory["models"]["llama"]["state"] == "awake"


def test_any_order_of_beds_brings_the_same_answers(llm: LLM) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    numbers = random.Random(seed)
    expected = answers(llm)
    for _ in range(6):
        bed = numbers.choice(BEDS)
        llm.engine.sleep(bed)
        assert llm.engine.model_state == bed.state == llm.memory()["models"]["llama"]["state"]
        llm.engine.wake()
        assert answers(llm) == expected


@pytest.mark.parametrize("bed", BEDS, ids=lambda bed: bed.state)
def test_asleep_it_holds_nothing_but_what_was_set_aside(bed: Bed) -> None:
    with open_llm("elastic") as llm:
        answers(llm)
        weights = llm.memory()["weights"]
        llm.engine.sleep(bed)
        memory = llm.memory()
        assert (memory["mapped"], memory["weights"], memory["kv_cached"]) == (0, 0, 0)
        assert memory["physical"] == memory["parked"] == (weights if bed.park else 0)
        llm.engine.wake()
        assert llm.memory()["weights"] == weights


def test_a_fixed_pool_gets_the_pages_back_and_the_device_does_not() -> None:
    with open_llm("fixed") as llm:
        before = llm.memory()
        llm.engine.sleep(Bed(1))
        after = llm.memory()
        assert after["physical"] == after["free_handles"] == before["physical"]
        llm.engine.wake()


def test_no_prefix_of_before_is_hit_afterwards(llm: LLM) -> None:
    answers(llm)
    llm.engine.sleep(Bed(1))
    llm.engine.wake()
    assert [answer.cached_tokens for answer in llm.generate(PROMPTS, GREEDY)] == [0, 0]


def test_a_request_to_a_sleeping_model_is_told_to_come_back() -> None:
    with open_llm("elastic") as llm:
        llm.engine.sleep(Bed(1))
        (answer,) = llm.generate([[1, 2]], GREEDY)
        assert answer.error is not None and (answer.error.status, answer.error.code) == (503, "model_sleeping")
        assert answer.error.retry_after == 1


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    with open_llm("elastic") as llm:
        assert code_of(llm.engine.wake) == (409, "already_awake")
        for bed in (Bed(1), Bed(2)):
            llm.engine.sleep(bed)  # from light to deep: the copy goes, too
            assert code_of(lambda bed=bed: llm.engine.sleep(bed)) == (409, "already_asleep")
        assert code_of(lambda: llm.engine.sleep(Bed(1))) == (409, "already_asleep")
        llm.engine.wake()
    with LLM(tiny_checkpoint("llama"), max_cache_size=16 * MIB) as plain:
        assert code_of(lambda: plain.engine.sleep(Bed(1))) == (400, "vmm_weights_required")


def test_open_requests_are_waited_for_or_ended_if_that_is_asked() -> None:
    with open_llm("elastic") as llm:
        submit(llm, "first")
        assert code_of(lambda: llm.engine.sleep(Bed(1))) == (409, "model_busy")
        llm.engine.sleep(Bed(1), "wait")
        assert llm.engine.model_state == "falling asleep"
        assert code_of(llm.engine.wake) == (409, "falling_asleep")
        outputs = [output for _ in range(12) for output in llm.engine.step().outputs]
        llm.engine.fall_asleep()
        assert outputs[-1].finish == "length" and llm.engine.model_state == "light"
        llm.engine.wake()
        submit(llm, "second")
        llm.engine.step()
        llm.engine.sleep(Bed(2), "abort")
        (ended,) = llm.engine.step().outputs
        assert ended.error is not None and ended.error.code == "model_sleeping"
        assert llm.engine.model_state == "deep"


@pytest.mark.parametrize("verb", ["create", "map", "unmap"])
def test_a_device_that_refuses_leaves_it_as_it_was_and_the_next_try_works(verb: str) -> None:
    driver = FaultyDriver(open_driver("cpu", page_bytes=4096))
    with open_llm("elastic", driver=driver, phy_page_granularity_size=4096) as llm:
        expected = answers(llm)
        for bed in BEDS:
            driver.reset_counts()
            driver.fail(verb, 1, False)
            for change in (lambda bed=bed: llm.engine.sleep(bed), llm.engine.wake):
                while True:
                    try:
                        change()
                        break
                    except RequestError as error:
                        assert error.status == 503, error
            assert answers(llm) == expected
        llm.engine.check()


def test_a_hundred_cycles_leak_nothing() -> None:
    with open_llm("elastic") as llm:
        expected = answers(llm)
        physical = llm.memory()["weights"]
        for number in range(100):
            llm.engine.sleep(BEDS[number % 3])
            llm.engine.wake()
        assert answers(llm) == expected
        memory = llm.memory()
        assert memory["weights"] == physical and memory["ranks"][0]["unaccounted"] == 0


def submit(llm: LLM, name: str) -> None:
    assert llm.engine.submit(Request(request_id=name, prompt_ids=[1, 2, 3], sampling=GREEDY)) is None


def code_of(call: object) -> tuple[int, str]:
    with pytest.raises(RequestError) as refused:
        call()  # type: ignore[operator]
    return refused.value.status, refused.value.code
