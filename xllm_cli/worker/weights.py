"""The parameters of one model on one rank: awake, or asleep in one of three ways, and the ways between.

    awake ─ sleep(1) → light   the pages are given back; a copy on the host brings the same bytes again
          ─ sleep(2) → deep    no copy either: the checkpoint is read and packed anew
          ─ park()   → parked  the pages are only set aside: awake again by mapping them
    parked ─ give_up() → light its pages are given back after all
    light, deep, parked ─ wake() → awake

A state changes only when all of its change is done; what fails leaves the state as it was and may be tried again.
Knows no request and no KV.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import torch

from xllm_cli.errors import DeviceError, MemoryShortage, ModelError, XllmError
from xllm_cli.vmm.driver import VmmError
from xllm_cli.vmm.pool import PagePool
from xllm_cli.vmm.weights import CHANGED, WeightArena
from xllm_cli.worker.backup import Backup
from xllm_cli.worker.exhaustion import bytes_refused

log = logging.getLogger(__name__)

State = Literal["awake", "light", "deep", "parked"]
LEVELS: dict[int, State] = {1: "light", 2: "deep"}
NO_COPY = "a light sleep wakes by reading the checkpoint again"


class User(Protocol):
    """A name under which the weights are used, see sharing.py."""

    @property
    def state(self) -> State:
        """What it sleeps in."""
        ...


class WeightsError(XllmError):
    """The device, its memory, the disk or the checkpoint refused; the state is what it was."""


@contextmanager
def _refusals() -> Iterator[None]:
    """What may go wrong without anybody's fault leaves as a WeightsError."""
    try:
        yield
    except (VmmError, OSError, ModelError, MemoryShortage, DeviceError) as error:
        raise WeightsError(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        if bytes_refused(error) is None:
            raise
        raise WeightsError(f"out of memory: {error}") from error


class Weights:
    """One model's arena and what can fill it again.

    `reload` reads the checkpoint into the memory it is given, in the order in which it was loaded. `copies` are the
    kinds of copy to try, see copy_of(). Without any a light sleep wakes as a deep one.
    """

    def __init__(
        self,
        arena: WeightArena,
        pool: PagePool,
        *,
        reload: Callable[[Refill], None],
        copies: Sequence[Callable[[int], Backup]],
    ) -> None:
        """Awake, with a copy."""
        self._arena = arena
        self.pool = pool
        self._reload = reload
        self._copies = copies
        self._backup = copy_of(arena, pool, copies)
        self.state: State = "awake"
        self.users: list[User] = []
        self.are_coming = False  # a wake-up is in the middle, see sharing.py
        self.is_late = False  # nobody is awake, and the device did not let the pages go

    @property
    def nbytes(self) -> int:
        """Bytes of pages that the parameters need when awake."""
        return self._arena.pages * self.pool.page_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of pages mapped now."""
        return self._arena.mapped_bytes

    @property
    def parked_bytes(self) -> int:
        """Bytes of pages set aside now."""
        return self._arena.kept_bytes

    def park(self) -> None:
        """awake → parked. WeightsError if a page cannot be unmapped."""
        assert self.state == "awake"
        self._let_go(self._arena.park)
        self.state = "parked"

    def sleep(self, level: int) -> None:
        """awake or parked → light (1) or deep (2); from light to deep the copy goes, too. WeightsError as park()."""
        assert self.state != "deep" and level in LEVELS
        if self.state != "light":
            self._let_go(self._arena.discard)
        if level == 2:
            self._drop_backup()
        self.state = LEVELS[level]
        self.pool.trim()  # only now: it may close what was left over, and somebody looks at the state then

    def _let_go(self, change: Callable[[], None]) -> None:
        """Where the device refuses both a page's way out and the others' way back, they are set aside: no row may run
        then."""
        try:
            with _refusals():
                change()
        except WeightsError:
            if self._arena.state == "parked":
                self.state = "parked"
            raise

    def give_up(self) -> int:
        """parked → light: somebody needs the pages. Returns the bytes given back; 0 if nothing is parked."""
        if self.state != "parked":
            return 0
        nbytes = self._arena.kept_bytes
        self.sleep(1)
        return nbytes

    def wake(self, *, keep_free: Callable[[], int] = lambda: 0) -> str:
        """→ awake: "" if it went well, else why there are no pages. Raises WeightsError; either way the state is what
        it was.

        `keep_free()` bytes stay free on the device, as it says while pages are taken. After a deep sleep there is a
        copy again, if there is room for it.
        """
        with _refusals():
            short = self._bring_back(keep_free)
        if not short:
            self.state = "awake"
        return short

    def _bring_back(self, keep_free: Callable[[], int]) -> str:
        if self.state == "parked":
            self._arena.unpark()
            return ""
        self._arena.discard()  # what a wake-up that failed could not give back
        if self._backup is not None:
            return self._arena.restore(self._backup.fill, keep_free=keep_free, settle=self._backup.settle)
        return self._read_again(keep_free)

    def _read_again(self, keep_free: Callable[[], int]) -> str:
        if short := self._arena.restore(_leave, keep_free=keep_free):
            return short
        try:
            refill = Refill(self._arena)
            self._reload(refill)
            refill.finish()
            self._backup = copy_of(self._arena, self.pool, self._copies)
        except BaseException:
            self._arena.discard()
            self.pool.trim()
            raise
        return ""

    def check(self) -> None:
        """Assert that the arena is where the state says; for tests."""
        self._arena.check()
        expected = {"awake": "resident", "parked": "parked"}.get(self.state, "absent")
        assert self.are_coming or self._arena.state == expected, f"{self.state}, and the arena is {self._arena.state}"

    def close(self) -> bool:
        """Give everything back; False if a page or a tensor is still in use."""
        return all([self._drop_backup(), self._arena.close()])

    def _drop_backup(self) -> bool:
        backup, self._backup = self._backup, None
        return backup is None or self.pool.closes(backup.close)


class Refill:
    """The memory of an arena handed out again from its start, in the order of the first time."""

    def __init__(self, arena: WeightArena) -> None:
        self._arena = arena
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See models.ops.base.WeightMemory."""
        tensor, self._used = self._arena.view(shape, dtype, self._used)
        return tensor

    def finish(self) -> None:
        """ModelError if not all of it was taken: what the rest should hold is unknown."""
        if self._used != self._arena.used:
            raise ModelError(CHANGED)


def copy_of(arena: WeightArena, pool: PagePool, kinds: Sequence[Callable[[int], Backup]]) -> Backup | None:
    """A copy on the host, of the first of these kinds, each for so many bytes, that there is room for; a warning says
    why it is not the one before. None where there is room for none."""
    for position, kind in enumerate(kinds):
        began = time.monotonic()
        try:
            backup = _written(arena, pool, kind(arena.used))
        except (OSError, MemoryShortage, DeviceError) as error:
            follows = "another kind is tried" if position + 1 < len(kinds) else NO_COPY
            log.warning("no copy of the weights: %s; %s", str(error), follows)  # a record would keep the error's frames
        else:
            seconds = time.monotonic() - began
            log.info("a copy of the weights, %d bytes, is in %s after %.2f s", backup.nbytes, backup.place, seconds)
            return backup
    return None


def _written(arena: WeightArena, pool: PagePool, backup: Backup) -> Backup:
    try:
        backup.write(arena.read)
    except BaseException:  # called off, too
        pool.closes(backup.close)
        raise
    return backup


def _leave(chunk: torch.Tensor, offset: int) -> None:
    """Fill nothing: the checkpoint is read into the pages once all are there."""
