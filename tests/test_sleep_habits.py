"""What a model does by itself: it wakes for a request, and sleeps when nobody has asked for long."""

from __future__ import annotations

from contextlib import suppress

import pytest
from test_sleep import GREEDY, answers, code_of, open_llm, submit

from xllm_cli.engine.slumber import Bed
from xllm_cli.errors import RequestError
from xllm_cli.vmm.driver import FaultyDriver, open_driver


@pytest.mark.parametrize("bed", [Bed(1), Bed(2), Bed(1, park=True)], ids=lambda bed: bed.state)
def test_a_request_wakes_a_model_that_wakes_by_itself(bed: Bed) -> None:
    with open_llm("elastic", auto_wake=True) as llm:
        expected = answers(llm)
        llm.engine.sleep(bed)
        assert llm.engine.model_state == bed.state
        assert answers(llm) == expected and llm.engine.model_state == "awake"


def test_a_request_that_can_never_be_served_wakes_nobody() -> None:
    with open_llm("elastic", auto_wake=True) as llm:
        llm.engine.sleep(Bed(1))
        (answer,) = llm.generate([[1 << 30]], GREEDY)
        assert answer.error is not None and answer.error.status == 400 and llm.engine.model_state == "light"


def test_without_memory_to_wake_the_request_waits() -> None:
    driver = FaultyDriver(open_driver("cpu", page_bytes=4096))
    with open_llm("elastic", driver=driver, phy_page_granularity_size=4096, auto_wake=True) as llm:
        expected = answers(llm)
        llm.engine.sleep(Bed(1))
        driver.reset_counts()
        for attempt in (1, 2, 3):
            driver.fail("create", attempt, True)
        assert answers(llm) == expected and driver.counts()["create"] > 3


def test_a_request_that_waited_in_vain_for_a_model_to_wake_is_told_the_numbers() -> None:
    driver = FaultyDriver(open_driver("cpu", page_bytes=4096))
    flags = {"phy_page_granularity_size": 4096, "auto_wake": True, "memory_wait_seconds": 0.2}
    with open_llm("elastic", driver=driver, **flags) as llm:
        expected = answers(llm)
        llm.engine.sleep(Bed(1))
        driver.reset_counts()
        for attempt in range(1, 100):
            driver.fail("create", attempt, True)
        (answer,) = llm.generate([[1, 2]], GREEDY)
        assert answer.error is not None and (answer.error.status, answer.error.retry_after) == (503, 1)
        assert answer.error.code == "weights_memory_unavailable" and llm.engine.model_state == "light"
        for _ in range(100):
            with suppress(RequestError):
                llm.engine.wake()
        assert answers(llm) == expected


def test_a_model_that_nobody_asks_goes_to_sleep() -> None:
    with open_llm("elastic", sleep_idle_seconds=30.0, auto_wake=True) as llm:
        now = [100.0]
        llm.engine._clock = lambda: now[0]
        expected = answers(llm)
        llm.idle()
        assert 0 < llm.engine.seconds_until_due() <= 30
        now[0] += 29
        llm.idle()
        assert llm.engine.model_state == "awake"
        now[0] += 1
        llm.idle()
        assert llm.engine.model_state == llm.memory()["models"]["llama"]["state"] == "light"
        assert answers(llm) == expected


def test_while_requests_are_open_nobody_is_tired() -> None:
    with open_llm("elastic", sleep_idle_seconds=30.0) as llm:
        now = [100.0]
        llm.engine._clock = lambda: now[0]
        submit(llm, "open")
        now[0] += 100
        llm.engine.step()
        assert llm.engine.model_state == "awake"
        llm.engine.abort("open")
        llm.idle()
        assert llm.engine.model_state == "awake" and llm.engine.seconds_until_due() <= 30


def test_for_a_second_neighbours_are_asked_for_what_a_wake_up_lacked() -> None:
    driver = FaultyDriver(open_driver("cpu", page_bytes=4096))
    with open_llm("elastic", driver=driver, phy_page_granularity_size=4096, vmm_memory_reserve_bytes=1 << 50) as llm:
        now = [100.0]
        llm.engine._clock = lambda: now[0]
        llm.engine.sleep(Bed(1))
        assert code_of(llm.engine.wake) == (503, "weights_memory_unavailable")
        assert llm.engine.needs.of_device(now[0]) > 1 << 49
        now[0] += 1
        assert llm.engine.needs.of_device(now[0]) == 0 and llm.engine.model_state == "light"
