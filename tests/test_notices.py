"""When a shortage is told: at once when its cause changes, then seldom, and with how often it was not told."""

from __future__ import annotations

import logging

import pytest
from cache_ops import Clock

from xllm_cli.engine.notices import FLAP_SECONDS, QUIET_SECONDS, Notices


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_same_cause_is_told_once_in_a_while_with_the_number_left_out(clock: Clock, caplog):
    caplog.set_level(logging.INFO, "xllm.engine")
    notices = Notices(clock)
    for _ in range(1000):
        notices.say("growth", "arena", "limited by %s", "arena")
    clock.now += QUIET_SECONDS
    notices.say("growth", "arena", "limited by %s", "arena")
    assert caplog.messages == ["limited by arena", "limited by arena (999 more since the last line)"]


def test_another_cause_is_told_but_two_that_take_turns_do_not_fill_the_log(clock: Clock, caplog):
    caplog.set_level(logging.INFO, "xllm.engine")
    notices = Notices(clock)
    for step in range(1000):
        cause = ("arena", "free_memory")[step % 2]
        notices.say("growth", cause, "limited by %s", cause)
        clock.now += 0.01
    assert set(caplog.messages[:1]) == {"limited by arena"}
    assert 2 <= len(caplog.messages) <= 10 / FLAP_SECONDS + 1


def test_topics_do_not_silence_each_other(clock: Clock, caplog):
    notices = Notices(clock)
    notices.say("map", "", "no pages", level=logging.WARNING)
    notices.say("run", "", "no memory", level=logging.WARNING)
    assert caplog.messages == ["no pages", "no memory"]
