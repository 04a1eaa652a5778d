"""Long work beside a loop: never both at once, and what it raises arrives."""

from __future__ import annotations

import threading

import pytest

from xllm_cli.engine.slices import CalledOff, Sliced


def test_work_and_loop_take_turns() -> None:
    seen: list[object] = []

    def work() -> str:
        for number in range(3):
            seen.append((number, threading.current_thread().name))
            sliced.pause()
        return "made"

    sliced = Sliced(work)
    while not sliced.advance(0.0):
        seen.append("loop")
    assert seen == [(0, "slices"), "loop", (1, "slices"), "loop", (2, "slices"), "loop"]
    assert sliced.result() == "made" and sliced.advance(0.0)


def test_a_long_slice_goes_to_the_end_and_beats_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xllm_cli.engine.slices.POLL_SECONDS", 0.01)
    beats: list[None] = []
    enough = threading.Event()

    def work() -> None:
        for _ in range(10):
            sliced.pause()
        enough.wait(20)

    def beat() -> None:
        beats.append(None)
        if len(beats) == 3:
            enough.set()

    sliced = Sliced(work)
    assert sliced.advance(60.0, beat) and len(beats) == 3


def test_what_the_work_raises_is_raised_where_its_result_is_wanted() -> None:
    def work() -> None:
        sliced.pause()
        raise ValueError("broken")

    sliced = Sliced(work)
    assert not sliced.advance(0.0) and sliced.advance(0.0)
    with pytest.raises(ValueError, match="broken"):
        sliced.result()


def test_called_off_it_ends_where_it_pauses_and_may_undo() -> None:
    seen: list[str] = []

    def work() -> None:
        try:
            while True:
                sliced.pause()
        except CalledOff:
            seen.append("undone")
            raise

    sliced = Sliced(work)
    assert not sliced.advance(0.0)
    sliced.call_off()
    assert sliced.is_done and seen == ["undone"]
    with pytest.raises(CalledOff):
        sliced.result()


def test_called_off_before_it_began_it_never_does() -> None:
    sliced = Sliced(lambda: pytest.fail("it began"))
    sliced.call_off()
    assert sliced.is_done


def test_a_pause_elsewhere_is_none() -> None:
    assert not Sliced(lambda: None).pause()
