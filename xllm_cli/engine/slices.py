"""Long work in slices, between which the loop goes on.

    loop   ── advance ┐                 ┌ a step, another ── advance ┐
    work              └ tensor, tensor ─┘                            └ tensor, done

The work has a thread of its own for its stack alone: one of the two always waits for the other, so the work may use
whatever the loop's thread owns, and there are no locks. Knows nothing of the work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from xllm_cli.errors import RequestError

Made = TypeVar("Made")

POLL_SECONDS = 0.5  # a slice that lasts: its caller has a sign of life to give meanwhile
END_SECONDS = 60.0  # for work that was called off to come to where it may end


def forget_frames(error: BaseException) -> None:
    """Where an error came from is not known any more, and what the frames there hold lives no longer."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__


class CalledOff(BaseException):
    """Raised in the work, where it pauses: nobody waits for it any more."""


class Sliced(Generic[Made]):
    """`work` calls pause() often; it begins with the first advance(). `name` is what it is about."""

    def __init__(self, work: Callable[[], Made], name: str = "") -> None:
        self.name = name
        self._work = work
        self._made: list[Made] = []
        self._error: BaseException | None = None
        self._until = 0.0
        self._is_called_off = False
        self._go = threading.Event()
        self._paused = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slices", daemon=True)
        self.is_done = False

    def _run(self) -> None:
        self._wait()
        self._run_here()
        self._paused.set()

    def _run_here(self) -> None:
        try:
            if not self._is_called_off:
                self._made.append(self._work())
        except RequestError as error:
            forget_frames(error)
            self._error = error
        except BaseException as error:  # whatever it is: it is raised again where the result is asked for
            self._error = error
        self.is_done = True

    def finish(self) -> None:
        """Do all of it now, in this thread: where a thread is bound to its device."""
        self._run_here()

    def advance(self, seconds: float, beat: Callable[[], None] = lambda: None) -> bool:
        """Let the work go on for about so long, or until it has ended: True then. `beat` is called now and then."""
        if self.is_done:
            return True
        self._until = time.monotonic() + seconds
        if not self._thread.ident:
            self._thread.start()
        self._paused.clear()
        self._go.set()
        while not self._paused.wait(POLL_SECONDS):
            beat()
        return self.is_done

    def pause(self, *, at_once: bool = False) -> bool:
        """For the work: give way if its slice is over, and this need not be done `at_once`. False, and nothing done, if
        somebody else calls it."""
        if self.is_done or threading.current_thread() is not self._thread:
            return False
        if at_once:
            return True
        if self._is_called_off:
            raise CalledOff
        if time.monotonic() >= self._until:
            self._paused.set()
            self._wait()
            if self._is_called_off:
                raise CalledOff
        return True

    def _wait(self) -> None:
        while not self._go.wait(POLL_SECONDS):
            pass  # the process ends without this thread
        self._go.clear()

    def result(self) -> Made:
        """What came of it, once it is done; raises what the work raised."""
        assert self.is_done
        if self._error is not None:
            raise self._error
        return self._made[0]

    def call_off(self) -> None:
        """End it where it pauses next. What it had begun is the work's to undo."""
        self._is_called_off = True
        self._error = self._error or CalledOff()
        if self._thread.ident and not self.is_done:
            self.advance(END_SECONDS)
            self._thread.join(END_SECONDS)
        self.is_done = True


class SliceQueue:
    """Work that is done in slices, one after the other. Refers to none of those whose work it is: what they hold ends
    with them."""

    def __init__(self, beat: Callable[[], None]) -> None:
        """`beat` is the sign of life of whoever waits for work of any kind."""
        self._beat = beat
        self._begun: deque[Sliced[Any]] = deque()
        self.at_once = False  # what is done now may not be left in the middle

    def __bool__(self) -> bool:
        return bool(self._begun)

    @property
    def names(self) -> list[str]:
        """What each of those is about that have begun and not ended."""
        return [slices.name for slices in self._begun if not slices.is_done]

    def add(self, slices: Sliced[Any]) -> None:
        """Do this, too."""
        self._begun.append(slices)

    def advance(self, seconds: float) -> None:
        """Let what began first go on for about so long."""
        if self._begun and self._begun[0].advance(seconds, self._beat):
            self._begun.popleft()

    def pause(self) -> None:
        """Long work is under way: the first of these, or somebody else's."""
        if not self._begun or not self._begun[0].pause(at_once=self.at_once):
            self._beat()

    def call_off(self) -> None:
        """End all of it, with nothing left behind."""
        while self._begun:
            self._begun[0].call_off()
            self._begun.popleft()
