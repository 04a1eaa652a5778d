"""Long work beside a loop: never both at once, and what it raises arrives."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from xllm_cli.engine.slices import CalledOff, Sliced, SliceQueue
from xllm_cli.errors import RequestError


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
    assert not Sliced(lambda: None).pause() and not Sliced(lambda: None).give_way()


def test_an_interrupt_of_the_loop_ends_the_work_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xllm_cli.engine.slices.POLL_SECONDS", 0.01)
    undone = threading.Event()

    def work() -> None:
        try:
            while True:
                sliced.pause()
        finally:
            undone.set()

    def interrupt() -> None:
        raise KeyboardInterrupt

    sliced = Sliced(work)
    with pytest.raises(KeyboardInterrupt):
        sliced.advance(60.0, interrupt)
    assert undone.is_set() and sliced.is_done
    with pytest.raises(CalledOff):
        sliced.result()


INTERRUPTED = """
import os, signal, time
from xllm_cli.engine.slices import Sliced

def work():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            sliced.pause()
    finally:
        for _ in range(3):  # whoever is impatient
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        print("undone", flush=True)

sliced = Sliced(work)
try:
    sliced.advance(60.0)
except KeyboardInterrupt:
    print("alone", flush=True)
"""


def test_nobody_is_so_impatient_that_two_threads_run() -> None:
    ran = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.returncode) == ("undone\nalone\n", 0), ran.stderr


def test_done_here_only_a_refusal_is_kept_for_later() -> None:
    def refuse() -> None:
        raise RequestError("no")

    def fail() -> None:
        raise ValueError("broken")

    refused = Sliced(refuse)
    refused.finish()
    with pytest.raises(RequestError):
        refused.result()
    with pytest.raises(ValueError, match="broken"):
        Sliced(fail).finish()


def test_lanes_take_turns_and_within_one_work_waits() -> None:
    seen: list[str] = []

    def work(name: str) -> Sliced[None]:
        def run() -> None:
            for _ in range(2):
                seen.append(name)
                queue.pause()

        return Sliced(run, name)

    queue = SliceQueue(lambda: None)
    for name in ("a1", "a2", "b1"):
        queue.add(work(name), name[0])
    assert queue.names == ["a1", "a2", "b1"]
    while queue:
        queue.advance(0.0)
    assert seen == ["a1", "b1", "a1", "b1", "a2", "a2"]


def test_whoever_must_wait_for_another_lane_lets_it_go_on() -> None:
    there: list[str] = []

    def wait() -> None:
        while not there:
            queue.wait()
        there.append("waited")

    def come() -> None:
        queue.pause()
        there.append("came")

    queue = SliceQueue(lambda: None)
    queue.add(Sliced(wait), "waits")
    queue.add(Sliced(come), "comes")
    while queue:
        queue.wait()  # and so does the loop itself
    assert there == ["came", "waited"]
