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
from xllm_cli.engine.slices import forget_frames
from xllm_cli.errors import RequestError
from xllm_cli.worker.sharing import WeightsShare
from xllm_cli.worker.weights import WeightsError

Mode = Literal["refuse", "wait", "abort"]
RETRY_SECONDS = 1
STIR_SECONDS = 0.05  # between two tries to wake for a request that waits


@dataclass(frozen=True, slots=True)
class Bed:
    """How to sleep: with a copy (level 1), without (2), or only aside (`park`)."""

    level: int = 1
    park: bool = False

    @property
    def state(self) -> str:
        """The state it leads to."""
        return "parked" if self.park else {1: "light", 2: "deep"}[self.level]


LIGHT, DEEP = Bed(1), Bed(2)


@dataclass(frozen=True, slots=True)
class Habits:
    """What a model does by itself: wake for a request, and sleep after so long without one (0: never)."""

    auto_wake: bool = False
    idle_seconds: float = 0.0


NO_HABITS = Habits()


class Slumber:
    """The states of one model's weights as requests meet them. `weights` None: they are ordinary and never sleep."""

    def __init__(self, cache: CacheManager, weights: WeightsShare | None, habits: Habits = NO_HABITS) -> None:
        self._cache = cache
        self._weights = weights
        self._habits = habits
        self._idle_since: float | None = None  # of the engine's clock; None while requests are open
        self.missing = 0  # bytes that the last wake-up lacked
        self._missing_until = 0.0
        self._stirs_at = 0.0
        self.put_off_by: RequestError | None = None  # why it could not wake for a request the last time
        self.falling: Bed | None = None  # asleep as soon as nothing runs
        self.is_waking = False  # its wake-up has begun, or waits for another's to end

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

    @property
    def is_asleep(self) -> bool:
        """No row can run: not even those of requests that are waited for."""
        return self._weights is not None and self._weights.state != "awake"

    def refusal(self) -> RequestError | None:
        """Why a request cannot be taken now; None while awake, or if it wakes by itself: then the request waits."""
        if self.is_awake or (self._habits.auto_wake and self.falling is None):
            return None
        what = "it is being woken" if self.is_waking else "POST /wakeup wakes it"
        text = f"the model is asleep ({self.state}); {what}"
        return RequestError(text, status=503, code="model_sleeping", retry_after=RETRY_SECONDS)

    def may_stir(self, now: float) -> bool:
        """It sleeps, wakes by itself, does not already, and has not just tried in vain."""
        return self.is_asleep and self._habits.auto_wake and not self.is_waking and now >= self._stirs_at

    def put_off(self, error: RequestError, now: float) -> None:
        """It could not wake for this reason: the next try comes a little later."""
        self.put_off_by = error
        self._stirs_at = now + STIR_SECONDS

    def stir(self) -> None:
        """There may be memory now: the next try may come at once."""
        self._stirs_at = 0.0
        self.missing = 0

    def exchange(self, weights: WeightsShare) -> None:
        """These are the weights from now on, awake."""
        self._weights = weights
        self._tell_cache(weights)

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
        if self.is_waking:
            text = "the model is being woken: once it is awake it can be put to sleep"
            raise RequestError(text, status=409, code="model_waking", retry_after=RETRY_SECONDS)
        if self.falling is not None or weights.state in (bed.state, "deep") or (bed.park and weights.state != "awake"):
            raise RequestError(f"the model is already {_asleep(self.state)}", status=409, code="already_asleep")
        if num_requests and mode == "refuse":
            raise model_busy(num_requests)

    def fall_asleep(self, bed: Bed, leave_pages: Callable[[], None]) -> None:
        """Nothing runs or waits any more: let the KV go, by `leave_pages`, then the weights. RequestError 503 if the
        device keeps a page; the model is awake then, or as asleep as before."""
        weights = self._need_weights()
        self.falling = None
        self._cache.forget_all()
        self._cache.forget_bytes(self._cache.bands()["mapped"])
        if self._cache.kv_bytes:
            leave_pages()
        try:
            weights.park() if bed.park else weights.sleep(bed.level)
        except WeightsError as error:
            text = f"the device did not take the weights' pages: {error}; the model is {weights.state}"
            raise RequestError(text, status=503, code="sleep_failed", retry_after=RETRY_SECONDS) from error
        finally:
            self._tell_cache(weights)

    def check_wake(self) -> None:
        """RequestError 409 if it is awake, about to sleep, or being woken."""
        weights = self._need_weights()
        if self.is_waking:
            text = "the model is being woken already: it is awake soon"
            raise RequestError(text, status=409, code="model_waking", retry_after=RETRY_SECONDS)
        if self.falling is not None:
            text = "the model is falling asleep: once its open requests have ended it can be woken"
            raise RequestError(text, status=409, code="falling_asleep", retry_after=RETRY_SECONDS)
        if weights.state == "awake":
            raise RequestError("the model is already awake", status=409, code="already_awake")

    def wake(self, clock: Callable[[], float]) -> None:
        """Bring the weights back; what cannot be is undone. RequestError 503 with the numbers if there is no memory:
        neighbours may be asked for it during the next second."""
        weights = self._need_weights()
        self.missing = 0
        try:
            short = self.shortage() or weights.wake(keep_free=self._cache.keep_free)
        except WeightsError as error:
            forget_frames(error)  # whoever keeps the refusal keeps no tensor over pages that are gone
            text = f"the weights could not be brought back: {error}; the model is still {_asleep(weights.state)}"
            raise RequestError(text, status=503, code="wake_failed", retry_after=RETRY_SECONDS) from error
        finally:
            self._tell_cache(weights)
        self.put_off_by = None
        if short:
            self.missing = self._bytes_missing(weights)
            self._missing_until = clock() + RETRY_SECONDS
            text = f"no memory for {weights.nbytes} bytes of weights: {short}"
            raise RequestError(text, status=503, code="weights_memory_unavailable", retry_after=RETRY_SECONDS)

    @property
    def takes_memory(self) -> bool:
        """Pages must be found for a wake-up; else they are only to be mapped."""
        return self._need_weights().bytes_to_wake > 0

    def shortage(self) -> str:
        """Why it would be in vain to begin: the caps on all models together, whatever is free, or what is free; "" if
        both leave room for the weights."""
        weights = self._need_weights()
        wanted = weights.bytes_to_wake
        if not wanted or weights.mapped_bytes or weights.are_coming:
            return ""
        room, free = self._cache.room_for_weights(), self._bytes_free(weights)
        if wanted > room:
            return f"the arena and --max_memory_utilization leave {max(0, room)} bytes beside what other models hold"
        if wanted <= free:
            return ""
        if not weights.is_fixed:
            return f"free memory: {max(0, free)} bytes beyond the {self._cache.keep_free()} that are to be kept"
        return f"fixed pool: {free} bytes are in no use"

    def _bytes_missing(self, weights: WeightsShare) -> int:
        """What somebody has to give up so that the weights fit."""
        return max(
            self._cache.page_bytes, weights.nbytes - min(self._bytes_free(weights), self._cache.room_for_weights())
        )

    def _bytes_free(self, weights: WeightsShare) -> int:
        seen = self._cache.observations[0]
        return seen.free_handles + (0 if weights.is_fixed else seen.free - self._cache.keep_free())

    def is_tight(self) -> bool:
        """What the wake-up that is in the middle, or about to begin, has still to take is free, but not twice."""
        weights = self._need_weights()
        rest = weights.claimed_bytes - weights.mapped_bytes if weights.are_coming else weights.bytes_to_wake
        return rest <= self._bytes_free(weights) < 2 * rest

    def missing_bytes(self, now: float) -> int:
        """What a wake-up of a moment ago lacked of the device's free memory."""
        return self.missing if self._cache.limits.elastic and now < self._missing_until else 0

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

    def _need_weights(self) -> WeightsShare:
        if self._weights is None:
            raise weights_required()
        return self._weights

    def see(self) -> None:
        """The pages may have moved for another name of the same weights."""
        if self._weights is not None:
            self._tell_cache(self._weights)

    def _tell_cache(self, weights: WeightsShare) -> None:
        """Asleep or not, the weights' pages are counted where they are; room for them when they wake is not kept."""
        mapped = weights.claimed_bytes
        asleep = weights.nbytes - min(mapped, weights.nbytes)
        self._cache.set_weights(mapped=mapped, on_device=weights.nbytes, asleep=asleep)


def model_busy(num_requests: int) -> RequestError:
    """Why a model that is asked things is left as it is."""
    text = f"{num_requests} requests are running or waiting: wait for them with mode=wait, or end them with abort"
    return RequestError(text, status=409, code="model_busy")


def weights_required() -> RequestError:
    """R4."""
    text = "sleep, wake-up, fork and update need weights in VMM pages: start the server with --enable_vmm_weights=true"
    return RequestError(text, code="vmm_weights_required", param="enable_vmm_weights")


def _asleep(state: str) -> str:
    return {"light": "asleep (light)", "deep": "asleep (deep)"}.get(state, state)
