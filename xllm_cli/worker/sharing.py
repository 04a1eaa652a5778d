"""One model's parameters under several names: each name sleeps and wakes by itself, the pages go with the last and come
with the first.

    the names   awake   light        the pages are as the shallowest name wants them: here they stay,
    the pages   awake                and waking the second name moves nothing

Owns who uses which weights and what each wants. How pages move is the business of Weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from xllm_cli.models.registry import Model
from xllm_cli.worker.weights import LEVELS, State, Weights, WeightsError

log = logging.getLogger(__name__)

DEPTH: dict[State, int] = {"awake": 0, "parked": 1, "light": 2, "deep": 3}


class WeightsShare:
    """The weights as one name has them: the same verbs, states and errors as Weights, for this name alone."""

    def __init__(self, weights: Weights) -> None:
        """One name more. Nothing moves: if the pages are away, it sleeps lightly until it is woken."""
        self._weights = weights
        self._wanted: State = "awake" if weights.state == "awake" else "light"
        weights.users.append(self)

    @property
    def weights(self) -> Weights:
        """What is shared: the same object for every name."""
        return self._weights

    @property
    def state(self) -> State:
        """What this name sleeps in; deeper than asked for where the device refused to take a step back."""
        return max(self._wanted, self._weights.state, key=DEPTH.__getitem__)

    @property
    def nbytes(self) -> int:
        """Bytes of pages that the parameters need when awake, shared or not."""
        return self._weights.nbytes

    @property
    def bytes_to_wake(self) -> int:
        """Bytes of pages that must be found until the parameters are awake."""
        return 0 if self._weights.state in ("awake", "parked") else self._weights.nbytes

    @property
    def is_fixed(self) -> bool:
        """Their pool makes no page anew."""
        return self._weights.pool.is_fixed

    @property
    def are_coming(self) -> bool:
        """Under some name a wake-up is in the middle: whoever wants them awake waits for that."""
        return self._weights.are_coming

    @property
    def mapped_bytes(self) -> int:
        """Bytes of pages mapped now."""
        return self._weights.mapped_bytes

    @property
    def claimed_bytes(self) -> int:
        """Bytes of pages mapped now, and of those that a wake-up which is in the middle has still to map."""
        return self.nbytes if self.are_coming else self.mapped_bytes

    @property
    def parked_bytes(self) -> int:
        """Bytes of pages set aside now."""
        return self._weights.parked_bytes

    def park(self) -> None:
        """awake → parked. See Weights."""
        assert self.state == "awake"
        self._move("parked")

    def sleep(self, level: int) -> None:
        """awake or parked → light (1) or deep (2); from light to deep, too. See Weights."""
        assert self.state != "deep" and level in LEVELS
        self._move(LEVELS[level])

    def _move(self, wanted: State) -> None:
        self._follow([wanted, *(user.state for user in self._weights.users if user is not self)])
        self._wanted = wanted

    def _follow(self, wanted: list[State]) -> None:
        """The pages go where the shallowest of all names wants them, if that is deeper than they are; if they are just
        coming, then when that has failed."""
        if self.are_coming:
            return
        target = min(wanted, key=DEPTH.__getitem__)
        if DEPTH[target] > DEPTH[self._weights.state]:
            self._weights.park() if target == "parked" else self._weights.sleep(DEPTH[target] - 1)

    def give_up(self) -> int:
        """parked → light: somebody needs the pages. Returns the bytes that left: none while another name parks, too."""
        if self.state != "parked":
            return 0
        before = self.parked_bytes
        self._move("light")
        return before - self.parked_bytes

    def wake(self, *, keep_free: Callable[[], int] = lambda: 0) -> str:
        """→ awake; see Weights. Nothing moves if another name is awake. Not while they are coming: what another name
        asks for then moves nothing."""
        assert not self.are_coming
        short = "" if self._weights.state == "awake" else self._bring_back(keep_free)
        if not short:
            self._wanted = "awake"
        return short

    def _bring_back(self, keep_free: Callable[[], int]) -> str:
        weights = self._weights
        weights.are_coming = True
        try:
            return weights.wake(keep_free=keep_free)
        finally:
            weights.are_coming = False
            if weights.state != "awake":
                self._follow([user.state for user in weights.users])

    def check(self) -> None:
        """Assert that the pages are as the shallowest name wants them; for tests."""
        self._weights.check()
        states = [user.state for user in self._weights.users]
        shallowest = min(states, key=DEPTH.__getitem__)
        is_late = self._weights.is_late and DEPTH[shallowest] > DEPTH[self._weights.state]
        assert is_late or shallowest == self._weights.state, f"names are {states}, the pages {self._weights.state}"

    def close(self) -> bool:
        """Let go; the last name gives everything back. False if a page or a tensor is still in use then. Doing it twice
        changes nothing."""
        if self not in self._weights.users:
            return True
        self._weights.users.remove(self)
        if not self._weights.users:
            return self._weights.close()
        self._weights.pool.closes(self._leave_to_others)
        return True

    def _leave_to_others(self) -> bool:
        """The pages go where those who stay want them; False if the device refuses for now."""
        try:
            self._follow([user.state for user in self._weights.users] or ["awake"])
        except WeightsError as error:
            log.warning("weights that only sleepers use stay where they are for now: %s", str(error))
            self._weights.is_late = True
        else:
            self._weights.is_late = False
        return not self._weights.is_late


class Loaded(NamedTuple):
    """A model and its weights as one name has them."""

    model: Model
    weights: WeightsShare
