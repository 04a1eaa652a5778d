"""Whether an engine's model is awake, and what sleeping and waking ask of its requests, its cache and its weights.

    awake ─ sleep → [its requests end, if that is waited for] → light | deep | parked ─ wake → awake

The KV goes before the weights and comes back with the first request. What fails leaves the model as it was. Knows no
HTTP and no page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from xllm_cli.cache.manager import CacheManager
from xllm_cli.errors import RequestError
from xllm_cli.worker.weights import Weights, WeightsError

Mode = Literal["refuse", "wait", "abort"]
RETRY_SECONDS = 1


@dataclass(frozen=True, slots=True)
class Bed:
    """How to sleep: with a copy (level 1), without (2), or only aside (`park`)."""

    level: int = 1
    park: bool = False

    @property
    def state(self) -> str:
        """The state it leads to."""
        return "parked" if self.park else {1: "light", 2: "deep"}[self.level]


@dataclass(frozen=True, slots=True)
class Habits:
    """What a model does by itself: wake for a request, and sleep after so long without one (0: never)."""

    auto_wake: bool = False
    idle_seconds: float = 0.0


NO_HABITS = Habits()


class Slumber:
    """The states of one model's weights as requests meet them. `weights` None: they are ordinary and never sleep."""

    def __init__(self, cache: CacheManager, weights: Weights | None, habits: Habits = NO_HABITS) -> None:
        self._cache = cache
        self._weights = weights
        self._habits = habits
        self._idle_since: float | None = None  # of the engine's clock; None while requests are open
        self._missing, self._missing_until = 0, 0.0
        self.falling: Bed | None = None  # asleep as soon as nothing runs

    @property
    def state(self) -> str:
        """awake, falling asleep, light, deep or parked."""
        if self.falling is not None:
            return "falling asleep"
        return "awake" if self._weights is None else self._weights.state

    @property
    def is_awake(self) -> bool:
        """Requests may be taken and run."""
        return self.state == "awake"

    def refusal(self) -> RequestError | None:
        """Why a request cannot be taken now; None while awake, or if it is the request that wakes it."""
        if self.is_awake or (self._habits.auto_wake and self.falling is None):
            return None
        text = f"the model is asleep ({self.state}); POST /wakeup wakes it"
        return RequestError(text, status=503, code="model_sleeping", retry_after=RETRY_SECONDS)

    def seconds_until_tired(self, now: float, *, is_busy: bool) -> float | None:
        """How long until it goes to sleep by itself if no request comes; None if it will not."""
        if is_busy or not self.is_awake or self._weights is None or not self._habits.idle_seconds:
            self._idle_since = None
            return None
        if self._idle_since is None:
            self._idle_since = now
        return max(0.0, self._idle_since + self._habits.idle_seconds - now)

    def stay_up(self, now: float) -> None:
        """It could not sleep: the next try comes after as long again."""
        self._idle_since = now

    def check_sleep(self, bed: Bed, *, num_requests: int, mode: Mode) -> None:
        """RequestError if it cannot sleep so now: no weights in pages, asleep already, or requests that go on."""
        weights = self._need_weights()
        if self.falling is not None or weights.state in (bed.state, "deep") or (bed.park and weights.state != "awake"):
            raise RequestError(f"the model is already {_asleep(self.state)}", status=409, code="already_asleep")
        if num_requests and mode == "refuse":
            text = (
                f"{num_requests} requests are running or waiting: wait for them with mode=wait, or end them with abort"
            )
            raise RequestError(text, status=409, code="model_busy")

    def fall_asleep(self, bed: Bed, leave_pages: Callable[[], None]) -> None:
        """Nothing runs or waits any more: let the KV go, by `leave_pages`, then the weights. RequestError 503 if the
        device keeps a page; the model is awake then, or as asleep as before."""
        weights = self._need_weights()
        self.falling = None
        self._cache.forget_all()
        self._cache.forget_bytes(self._cache.bands()["mapped"])
        leave_pages()
        try:
            weights.park() if bed.park else weights.sleep(bed.level)
        except WeightsError as error:
            text = f"the device did not take the weights' pages: {error}; the model is {weights.state}"
            raise RequestError(text, status=503, code="sleep_failed", retry_after=RETRY_SECONDS) from error
        finally:
            self._tell_cache(weights)

    def wake(self, now: float) -> None:
        """Bring the weights back. RequestError 409 if it is awake or about to sleep, 503 with the numbers if there is
        no memory: neighbours may be asked for it during the next second."""
        weights = self._need_weights()
        if self.falling is not None:
            text = "the model is falling asleep: once its open requests have ended it can be woken"
            raise RequestError(text, status=409, code="falling_asleep", retry_after=RETRY_SECONDS)
        if weights.state == "awake":
            raise RequestError("the model is already awake", status=409, code="already_awake")
        try:
            short = weights.wake(keep_free=self._cache.keep_free())
        except WeightsError as error:
            text = f"the weights could not be brought back: {error}; the model is still {_asleep(weights.state)}"
            raise RequestError(text, status=503, code="wake_failed", retry_after=RETRY_SECONDS) from error
        finally:
            self._tell_cache(weights)
        if short:
            seen = self._cache.observations[0]
            self._missing = max(0, weights.nbytes + self._cache.keep_free() - seen.free)
            self._missing_until = now + RETRY_SECONDS
            text = f"no memory for {weights.nbytes} bytes of weights: {short}"
            raise RequestError(text, status=503, code="weights_memory_unavailable", retry_after=RETRY_SECONDS)

    def missing_bytes(self, now: float) -> int:
        """What a wake-up of a moment ago lacked of the device's free memory."""
        return self._missing if self._cache.limits.elastic and now < self._missing_until else 0

    def give_up_parked(self) -> int:
        """Somebody needs memory: what is only set aside goes back to the device. Returns its bytes."""
        if self._weights is None or self._weights.state != "parked":
            return 0
        try:
            return self._weights.give_up()
        except WeightsError:
            return 0  # parked still, and asked again when somebody is short again
        finally:
            self._tell_cache(self._weights)

    def _need_weights(self) -> Weights:
        if self._weights is None:  # R4
            raise RequestError(
                "sleep, wake-up and fork need weights in VMM pages: start the server with --enable_vmm_weights=true",
                code="vmm_weights_required",
                param="enable_vmm_weights",
            )
        return self._weights

    def _tell_cache(self, weights: Weights) -> None:
        """Asleep or not, the weights' pages are counted where they are; room for them when they wake is not kept."""
        self._cache.set_weights(mapped=weights.mapped_bytes, on_device=weights.nbytes)


def _asleep(state: str) -> str:
    return {"light": "asleep (light)", "deep": "asleep (deep)"}.get(state, state)
