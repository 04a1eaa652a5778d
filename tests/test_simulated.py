"""An engine on a simulated accelerator: memory outside the pool comes and goes, peers strike, execution spikes.

Everything is scripted and counted in bytes; the cpu only computes the tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from simulated import BLOCK_BYTES, MIB, PAGE, Accelerator

from xllm_cli import LLM
from xllm_cli.core import Output, Request, SamplingParams
from xllm_cli.vmm.driver import FaultyDriver, VmmShortage, open_driver
from xllm_cli.vmm.simulated import SEGMENT_BYTES, SimulatedAllocator, SimulatedDriver

TOTAL = 64 * MIB
SPIKE = 8 * MIB


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def prompts(count: int, length: int) -> list[list[int]]:
    return [[(17 * i + 3 * j) % 250 for j in range(length)] for i in range(count)]


def submit(llm: LLM, prompt: list[int], max_tokens: int) -> None:
    name = str(llm.engine.snapshot().counters.steps) + str(prompt)
    assert llm.engine.submit(Request(request_id=name, prompt_ids=prompt, sampling=greedy(max_tokens))) is None


# --- the driver itself


def test_the_device_has_the_size_it_was_given_and_counts_what_others_hold():
    driver = SimulatedDriver(open_driver("cpu", mode="4k", page_bytes=PAGE), total_bytes=TOTAL)
    handles = driver.create(3)
    assert driver.take(MIB) and not driver.take(TOTAL)
    driver.peer = 2 * MIB
    info = driver.info()
    assert (info.name, info.total, info.free) == ("simulated", TOTAL, TOTAL - 3 * PAGE - 3 * MIB)
    driver.give(MIB)
    driver.peer = 0
    assert driver.destroy(handles) == []
    assert driver.info().free == TOTAL


def test_a_scripted_peer_strikes_just_before_the_call_it_waits_for():
    driver = SimulatedDriver(open_driver("cpu", mode="4k", page_bytes=PAGE), total_bytes=TOTAL)
    driver.before("create", 2, TOTAL)
    driver.before("create", 3, -TOTAL)
    (first,) = driver.create(1)
    with pytest.raises(VmmShortage, match="0 bytes of"):
        driver.create(1)
    assert len(driver.create(2)) == 2
    assert (driver.peer, driver.destroy([first])) == (0, [])


@pytest.mark.parametrize("nbytes", [TOTAL + 1, 1 << 62, 1 << 63])
def test_no_size_wraps_around(nbytes: int):
    driver = SimulatedDriver(open_driver("cpu", mode="4k", page_bytes=PAGE), total_bytes=TOTAL)
    assert not driver.take(nbytes)
    with pytest.raises(VmmShortage):
        driver.create(nbytes // PAGE + 1)
    with pytest.raises(ValueError, match="more is given back"):
        driver.give(nbytes)
    driver.peer = nbytes
    assert (driver.info().free, driver.peer) == (0, TOTAL)


def test_the_allocator_caches_what_is_freed_and_gives_it_back_when_emptied():
    driver = SimulatedDriver(open_driver("cpu", mode="4k", page_bytes=PAGE), total_bytes=TOTAL)
    allocator = SimulatedAllocator(driver)
    allocator.allocate(3 * SEGMENT_BYTES + 1)
    allocator.free(2 * SEGMENT_BYTES)
    assert (allocator.allocated(), allocator.reserved()) == (SEGMENT_BYTES + 1, 4 * SEGMENT_BYTES)
    assert allocator.peak_allocated() == 3 * SEGMENT_BYTES + 1
    allocator.empty_cache()
    assert (allocator.reserved(), driver.outside) == (2 * SEGMENT_BYTES, 2 * SEGMENT_BYTES)


# --- what steps need

SMALL = 4 * MIB
HELD = SMALL - 448 * 1024


@pytest.mark.parametrize("statistics", [True, False])
def test_what_is_freed_elsewhere_is_headroom_within_two_steps_only_with_statistics(monkeypatch, statistics: bool):
    accelerator = Accelerator(SMALL, statistics=statistics)
    with accelerator.serve(monkeypatch) as llm:
        if statistics:
            accelerator.allocator.allocate(HELD)
            llm.idle()
        else:
            accelerator.kept = HELD  # inside a step: nobody can tell that it is not needed again and again
        for prompt in prompts(3, 400):  # 26 blocks each, 312 KiB: only one fits
            submit(llm, prompt, 100)
        for _ in range(4):
            snapshot = llm.engine.step().snapshot
        assert (snapshot.num_running, snapshot.waiting_for) == (1, "memory")
        accelerator.allocator.free(HELD)
        if not statistics:
            accelerator.allocator.empty_cache()  # although the device has it back
        for _ in range(2):
            snapshot = llm.engine.step().snapshot
        assert snapshot.num_running == (3 if statistics else 1)
        assert snapshot.memory.execution_room == (0 if statistics else HELD)
        assert accelerator.allocator.num_emptied == 1


def fill(llm: LLM) -> None:
    """Requests until one has to wait for memory."""
    for prompt in prompts(64, 400):
        submit(llm, prompt, 100)
    while llm.engine.step().snapshot.waiting_for != "memory":
        assert llm.snapshot.num_running < 64


@pytest.mark.parametrize("reserve", [0, MIB])
def test_a_buffer_of_an_sdk_is_absorbed_by_the_reserve(monkeypatch, reserve: int):
    accelerator = Accelerator(SMALL)
    with accelerator.serve(monkeypatch, vmm_memory_reserve_bytes=reserve) as llm:
        fill(llm)
        assert accelerator.device.take(MIB) == bool(reserve)
        for _ in range(4):
            llm.engine.step()
        snapshot = llm.engine.snapshot()
        assert (snapshot.num_running > 0, snapshot.counters.exhausted_steps) == (True, 0)
        assert snapshot.memory.headroom <= 0 or not reserve  # the buffer is now in the reserve's place


@pytest.mark.parametrize("statistics", [True, False])
def test_without_a_reserve_the_room_of_the_largest_step_stays_free(monkeypatch, statistics: bool):
    accelerator = Accelerator(SMALL, statistics=statistics)
    accelerator.script([MIB])
    with accelerator.serve(monkeypatch, vmm_memory_reserve_bytes=0) as llm:
        fill(llm)
        accelerator.allocator.empty_cache()  # what the allocator cached, the steps to come need again
        for _ in range(6):
            memory = llm.engine.step().snapshot.memory
        assert (memory.reserve, memory.execution_peak) == (0, MIB)
        assert (accelerator.allocator.num_failures, llm.snapshot.counters.exhausted_steps) == (0, 0)
        assert accelerator.device.info().free >= memory.execution_room - accelerator.allocator.reserved()


# --- peers


def test_a_peer_that_strikes_between_check_and_map_makes_a_request_wait(monkeypatch):
    accelerator = Accelerator(SMALL)
    with accelerator.serve(monkeypatch, memory_wait_seconds=60) as llm:
        right = llm.generate(prompts(1, 200), greedy(8))[0].token_ids
        llm.engine.trim()
        llm.idle()
        accelerator.device.before("create", 1, SMALL)
        submit(llm, prompts(1, 200)[0], 8)
        first = llm.engine.step()
        assert (first.outputs, first.snapshot.num_waiting, first.snapshot.counters.map_failures) == ([], 1, 1)
        assert first.snapshot.memory.headroom_explained.startswith("no growth for a moment")
        for _ in range(3):
            time.sleep(0.02)
            snapshot = llm.engine.step().snapshot
        assert (snapshot.waiting_for, snapshot.memory.headroom_limited_by) == ("memory", "free_memory")
        assert snapshot.waiting_bytes == 13 * BLOCK_BYTES
        accelerator.device.peer = 0
        outputs = llm.engine.drain(time.monotonic() + 30)
        assert [token for output in outputs for token in output.token_ids] == right


def test_a_lone_decode_whose_map_fails_waits_and_keeps_what_it_computed(monkeypatch):
    accelerator = Accelerator(SMALL, faulty=True)
    with accelerator.serve(monkeypatch, max_cache_size=SMALL) as llm:
        right = llm.generate([[1] * 60], greedy(100))[0].token_ids
        llm.engine.trim()
        llm.idle()
        computed = llm.snapshot.counters.prompt_tokens_computed
        submit(llm, [1] * 60, 100)
        tokens = [token for output in llm.engine.step().outputs for token in output.token_ids]
        for nth in range(1, 4):
            accelerator.driver.fail("create", accelerator.driver.counts()["create_pages"] + nth, True)
        tokens += [token for output in llm.engine.drain(time.monotonic() + 30) for token in output.token_ids]
        counters = llm.snapshot.counters
        assert tokens == right
        assert (counters.map_failures, counters.preemptions) == (3, 0)
        assert counters.prompt_tokens_computed - computed == 60


# --- steps that run out


def test_a_step_that_runs_out_of_memory_is_computed_again_in_smaller_ones(monkeypatch):
    accelerator = Accelerator(SMALL)
    with accelerator.serve(monkeypatch) as llm:
        right = [answer.token_ids for answer in llm.generate(prompts(6, 50), greedy(12))]
        accelerator.script([0, SMALL, 2 * SMALL, 0])
        answers = llm.generate(prompts(6, 50), greedy(12))
        llm.engine.check()
        counters, memory = llm.snapshot.counters, llm.memory()
        assert [answer.token_ids for answer in answers] == right
        assert (counters.exhausted_steps, accelerator.allocator.num_failures) == (2, 2)
        assert memory["execution_peak"] == SMALL // 4  # as much as a failed allocation may ask for


def test_a_step_that_never_fits_ends_with_the_numbers_and_others_go_on(monkeypatch):
    accelerator = Accelerator(SMALL)
    with accelerator.serve(monkeypatch, memory_wait_seconds=0.3, enable_prefix_cache=False) as llm:
        accelerator.script([2 * SMALL])
        answer = llm.generate(prompts(1, 50), greedy(4))[0]
        assert (answer.error.status, answer.error.code) == (503, "execution_memory_unavailable")
        assert "Tried to allocate 8.00 MiB" in answer.error.message
        accelerator.script([0])
        assert len(llm.generate(prompts(2, 50), greedy(4))[1].token_ids) == 4
        llm.engine.check()


@pytest.mark.parametrize("cached", [True, False])
def test_a_token_that_never_fits_ends_its_request_though_those_before_it_run_each_time(monkeypatch, cached: bool):
    accelerator = Accelerator(TOTAL)
    with accelerator.serve(monkeypatch, memory_wait_seconds=0.3, enable_prefix_cache=cached) as llm:

        def spikes() -> Iterator[int]:
            while True:
                row = llm.engine._scheduler._draft.entries[0].row
                yield TOTAL if row.start + len(row.token_ids) > 60 else 0

        accelerator.script(spikes())
        submit(llm, prompts(1, 100)[0], 2)
        (output,) = llm.engine.drain(time.monotonic() + 20)
        assert output.error is not None and output.error.code == "execution_memory_unavailable"
        assert llm.generate(prompts(1, 40), greedy(4))[0].error is None


def test_an_error_that_is_not_about_memory_still_ends_the_step(monkeypatch):
    accelerator = Accelerator(SMALL)
    with accelerator.serve(monkeypatch) as llm:
        monkeypatch.setattr(accelerator.allocator, "allocate", lambda nbytes: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(prompts(1, 50), greedy(4))
        llm.engine.check()


# --- all at once


def disturb(accelerator: Accelerator, rng: random.Random) -> None:
    """Peers, spikes, buffers and failing calls."""
    device, driver = accelerator.device, accelerator.driver
    assert isinstance(driver, FaultyDriver)
    match rng.randrange(6):
        case 0:
            device.peer = rng.choice((0, 0, SMALL // 2, SMALL))
        case 1:
            device.before("create", rng.randrange(1, 4), rng.choice((MIB, SMALL, -SMALL)))
        case 2:
            accelerator.script([rng.choice((0, PAGE, MIB, SMALL)) for _ in range(rng.randrange(1, 4))] + [PAGE])
        case 3:
            verb = rng.choice(("create", "map", "unmap", "destroy", "info"))
            nth = driver.counts()[f"{verb}_pages"] + rng.randrange(1, 9)
            driver.fail(verb, nth, verb in ("create", "map") and rng.random() < 0.5)
        case 4:
            if device.outside > accelerator.allocator.reserved():
                device.give(device.outside - accelerator.allocator.reserved())
        case 5:
            device.take(rng.choice((PAGE, MIB)))


def calm(accelerator: Accelerator) -> None:
    """All of it ends, but for what is still planned."""
    accelerator.script([0])
    accelerator.device.peer = 0
    accelerator.device.give(accelerator.device.outside - accelerator.allocator.reserved())


def is_served_at_last(accelerator: Accelerator, llm: LLM, load: list[list[int]], right: list[list[int]]) -> bool:
    """Whether all is answered as ever once what was still planned has happened."""
    for _ in range(10):
        calm(accelerator)
        if [answer.token_ids for answer in llm.generate(load, greedy(25))] == right:
            return True
    return False


@pytest.mark.parametrize("statistics", [True, False])
def test_no_amount_of_bad_luck_ends_the_engine_or_changes_a_token(monkeypatch, statistics: bool):
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    accelerator = Accelerator(SMALL, statistics=statistics, faulty=True)
    load = prompts(12, 120)
    with accelerator.serve(monkeypatch, memory_wait_seconds=1.0) as llm:
        right = [answer.token_ids for answer in llm.generate(load, greedy(25))]
        given: dict[str, list[int]] = {}
        ended: dict[str, Output] = {}
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline or len(ended) < 24:
            assert time.monotonic() < deadline + 60
            if len(given) - len(ended) < 12:
                name = str(len(given))
                given[name] = []
                prompt = load[int(name) % len(load)]
                assert llm.engine.submit(Request(request_id=name, prompt_ids=prompt, sampling=greedy(25))) is None
            if ended and rng.random() < 0.2:
                disturb(accelerator, rng)
            for output in llm.engine.step().outputs:
                given[output.request_id] += output.token_ids
                if output.finish:
                    ended[output.request_id] = output
            llm.engine.check()
        calm(accelerator)
        for output in llm.engine.drain(time.monotonic() + 40):
            given[output.request_id] += output.token_ids
            if output.finish:
                ended[output.request_id] = output
        llm.engine.check()
        assert not llm.engine.has_work
        # without statistics a great fall is kept free for good, and what comes later may find nothing
        assert not statistics or is_served_at_last(accelerator, llm, load, right)
    codes = {output.error.code for output in ended.values() if output.error}
    assert codes <= {"kv_memory_unavailable", "execution_memory_unavailable"}
    for name, output in ended.items():
        assert output.error or given[name] == right[int(name) % len(load)], name
