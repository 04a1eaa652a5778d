"""Long work in slices, between which the loop goes on.

    loop   ── advance ┐                 ┌ a step, another ── advance ┐
    work              └ tensor, tensor ─┘                            └ tensor, done

The work has a thread of its own for its stack alone: one of the two always waits for the other, so the work may use
whatever the loop's thread owns, and there are no locks. An interrupt of the loop while it waits ends the work first.
Knows nothing of the work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from xllm_cli.errors import RequestError

Made = TypeVar("Made")

POLL_SECONDS = 0.5  # a slice that lasts: its caller has a sign of life to give meanwhile
WAIT_SECONDS = 0.1  # a slice while nobody has anything else to do
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
        self._work: Callable[[], Made] | None = work
        self._made: list[Made] = []
        self._error: BaseException | None = None
        self._until = 0.0
        self._is_called_off = False
        self._go = threading.Event()
        self._paused = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_done = False

    def _run(self) -> None:
        self._wait()
        self._run_here()
        self._ended.set()
        self._paused.set()

    def _run_here(self) -> None:
        work, self._work = self._work, None  # what it holds ends with it
        try:
            if not self._is_called_off and work is not None:
                self._made.append(work())
        except (RequestError, CalledOff) as error:
            forget_frames(error)
            self._error = error
        except BaseException as error:  # whatever it is: it is raised again where the result is asked for
            self._error = error
        self.is_done = True

    def finish(self) -> None:
        """Do all of it now, in this thread: where a thread is bound to its device, or nobody else has anything to do.
        Only a RequestError is kept for whoever asks for the result."""
        self._run_here()
        if self._error is not None and not isinstance(self._error, RequestError):
            raise self._error

    def advance(self, seconds: float, beat: Callable[[], None] = lambda: None) -> bool:
        """Let the work go on for about so long, or until it has ended: True then. `beat` is called now and then. What
        interrupts the wait, calls the work off."""
        if self.is_done:
            return True
        self._until = time.monotonic() + seconds
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="slices", daemon=True)
            self._thread.start()
        try:
            self._paused.clear()
            self._go.set()
            while not self._paused.wait(POLL_SECONDS):
                beat()
        except BaseException:
            self.call_off()  # whoever catches this goes on, and must be alone then
            raise
        return self.is_done

    def pause(self) -> bool:
        """For the work: give way if its slice is over. False, and nothing done, if somebody else calls it."""
        if not self.is_at_work:
            return False
        if self._is_called_off:
            raise CalledOff
        return time.monotonic() < self._until or self.give_way()

    def give_way(self) -> bool:
        """For the work: let the loop go on now. As pause()."""
        if not self.is_at_work:
            return False
        self._paused.set()
        self._wait()
        if self._is_called_off:
            raise CalledOff
        return True

    @property
    def is_at_work(self) -> bool:
        """It is the work that asks."""
        return not self.is_done and threading.current_thread() is self._thread

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
        """End it where it pauses next; what it had begun is the work's to undo. Returns once it has: further interrupts
        wait for that, too."""
        while not self.is_done:
            with suppress(KeyboardInterrupt, SystemExit):
                self._end()

    def _end(self) -> None:
        self._is_called_off = True
        self._go.set()  # wherever it waits
        if self._thread is not None:
            self._ended.wait(END_SECONDS)  # an interrupted join() would call the thread stopped
        if not self._made:
            self._error = self._error or CalledOff()
        self._work = None
        self.is_done = True


class SliceQueue:
    """Work that is done in slices: in each lane one after the other, the lanes by turns. Refers to none of those whose
    work it is: what they hold ends with them."""

    def __init__(self, beat: Callable[[], None]) -> None:
        """`beat` is the sign of life of whoever waits for work of any kind."""
        self._beat = beat
        self._lanes: dict[str, deque[Sliced[Any]]] = {}

    def __bool__(self) -> bool:
        return bool(self._lanes)

    @property
    def names(self) -> list[str]:
        """What each of those is about that have begun and not ended."""
        return [slices.name for begun in self._lanes.values() for slices in begun if not slices.is_done]

    def add(self, slices: Sliced[Any], lane: str) -> None:
        """Do this, too, after what was added to its lane before."""
        self._lanes.setdefault(lane, deque()).append(slices)

    def advance(self, seconds: float) -> None:
        """Let one of those that are first in their lanes go on for about so long."""
        if not self._lanes:
            return
        lane = next(iter(self._lanes))
        begun = self._lanes[lane] = self._lanes.pop(lane)  # the last from now on
        if begun[0].advance(seconds, self._beat):
            self._leave(lane)

    def _leave(self, lane: str) -> None:
        self._lanes[lane].popleft()
        if not self._lanes[lane]:
            del self._lanes[lane]

    def pause(self) -> None:
        """Long work is under way: what is done in slices, or somebody else's."""
        work = self._at_work()
        if work is None or not work.pause():
            self._beat()

    def wait(self) -> None:
        """What is done in slices must go on before the caller can, whoever that is."""
        work = self._at_work()
        if work is None or not work.give_way():
            self.advance(WAIT_SECONDS)

    def _at_work(self) -> Sliced[Any] | None:
        """Whose work calls this; None if somebody else does."""
        return next((begun[0] for begun in self._lanes.values() if begun[0].is_at_work), None)

    def call_off(self) -> None:
        """End all of it, with nothing left behind."""
        while self._lanes:
            lane, begun = next(iter(self._lanes.items()))
            begun[0].call_off()
            self._leave(lane)
