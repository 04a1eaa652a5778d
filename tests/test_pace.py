"""Steps that ran out of execution memory: half as much next time, more again once it went well for a while."""

from __future__ import annotations

from xllm_cli.engine.pace import RECOVERY_STEPS, Pace


def test_a_failed_step_halves_what_the_next_may_try():
    pace, tried = Pace(512), []
    for _ in range(5):
        pace.failed(pace.tokens, "full", 0.0)
        tried.append(pace.tokens)
    assert tried == [256, 128, 64, 32, 16]


def test_a_step_smaller_than_the_bound_halves_its_own_size():
    pace = Pace(512)
    pace.failed(20, "full", 0.0)
    assert (pace.tokens, pace.shortage) == (10, "full")


def test_twice_as_much_is_tried_after_steps_that_went_well_in_a_row():
    pace = Pace(64)
    pace.failed(32, "full", 0.0)
    for _ in range(RECOVERY_STEPS - 1):
        pace.succeeded()
    assert pace.tokens == 16
    pace.succeeded()
    assert (pace.tokens, pace.shortage) == (32, "")
    for _ in range(5 * RECOVERY_STEPS):
        pace.succeeded()
    assert pace.tokens == 64


def test_a_single_token_that_does_not_fit_rests_longer_each_time():
    pace, now, pauses = Pace(1), 0.0, []
    for _ in range(9):
        pace.failed(1, "full", now)
        start = now
        while pace.is_resting(now):
            now += 0.001
        pauses.append(round(now - start, 2))
    assert pauses[:3] == [0.01, 0.02, 0.04]
    assert pauses[-1] == 1.0


def test_a_step_that_ran_ends_the_rest():
    pace = Pace(1)
    for _ in range(8):
        pace.failed(1, "full", 0.0)
    pace.succeeded()
    pace.failed(1, "full", 10.0)
    assert pace.is_resting(10.005) and not pace.is_resting(10.02)
