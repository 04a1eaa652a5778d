"""Models that leave the pool: their requests end first, then all that they hold goes back, then their names are free.

    begin → [its open requests end] → emptied: KV, then weights → closed: addresses, threads → gone
                                      └ the device keeps a page: it stays, as the error says

Owns who is about to leave, and what those who left had counted: totals only grow. Knows no name and no HTTP.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Protocol

from xllm_cli.core import Counters, Output, Snapshot, StepEvents
from xllm_cli.engine.hosted import HostedModel
from xllm_cli.engine.report import add_counters, with_former
from xllm_cli.engine.slumber import DEEP, RETRY_SECONDS, Mode, model_busy
from xllm_cli.errors import RequestError


class Pages(Protocol):
    """The pool, as far as it matters to who leaves."""

    def close_again(self) -> bool:
        """Try what could not be closed before; True if nothing of that is left."""
        ...

    def trim(self) -> int:
        """Destroy the free handles of an elastic pool."""
        ...


class Departure:
    """A model on its way out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_done = False
        self._said: str | RequestError = ""

    def end(self, said: str | RequestError) -> None:
        """It is gone; or, with an error, it stays."""
        self.is_done, self._said = True, said

    def result(self) -> str:
        """What is worth telling, once it is gone; RequestError 503 if the device kept a page."""
        assert self.is_done
        if isinstance(self._said, RequestError):
            raise self._said
        return self._said


class Leaving:
    """begin() and, after every step, go_on()."""

    def __init__(self, pool: Pages | None) -> None:
        self._pool = pool
        self._departures: dict[HostedModel, Departure] = {}
        self._former = Counters()
        self._late: list[Output] = []

    def begin(self, model: HostedModel, mode: Mode) -> Departure:
        """Let a model leave as soon as none of its requests is open; nobody asks it anything from now on. RequestError
        409 if some are and are not to end. Twice is one departure, which a later mode may hurry."""
        engine = model.engine
        if engine.has_work and mode == "refuse":
            raise model_busy(engine.num_open)
        if mode == "abort":
            engine.end_requests(removed(model.name))
        departure = self._departures.setdefault(model, Departure(model.name))
        model.is_leaving = True
        return departure

    def go_on(self, is_changing: Callable[[str], bool]) -> Iterator[HostedModel]:
        """Let those go who have nothing open any more, and to whom nothing else happens; each that is gone."""
        idle = [model for model in self._departures if not model.engine.has_work]
        for model in [model for model in idle if not is_changing(model.name)]:
            departure = self._departures[model]
            try:
                _empty(model)
            except RequestError as error:
                model.is_leaving = False
                departure.end(error)
            else:
                departure.end(self._close(model))
                yield model
            del self._departures[model]

    def _close(self, model: HostedModel) -> str:
        """Give up what an empty model still has. What the device does not take back of that holds no memory, and the
        pool tries it again by and by: then the text says so."""
        self._former = add_counters(self._former, model.engine.snapshot().counters)
        self._late += model.engine.take_late()
        model.loaded = None  # its tensors look at the range that is released
        is_closed = model.engine.close(at_once=True)
        if self._pool is not None:
            gc.collect()
            is_closed = is_closed or self._pool.close_again()
            self._pool.trim()
        return "" if is_closed else "the device did not take all addresses back yet: they are tried again"

    def take_late(self) -> list[Output]:
        """The last outputs of those who left, once."""
        late, self._late = self._late, []
        return late

    @property
    def has_late(self) -> bool:
        """Requests ended with a model, and nobody was told yet."""
        return bool(self._late)

    def counted(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot of those who are there, with the totals of those who are not."""
        return with_former(snapshot, self._former) if self._has_counted else snapshot

    def told(self, events: StepEvents) -> StepEvents:
        """The events of the only one who is there, with what those who left have to tell."""
        late, snapshot = self.take_late(), events.snapshot
        if snapshot is None or not (late or self._has_counted):
            return events
        return StepEvents(events.outputs + late, self.counted(snapshot), events.map_seconds)

    @property
    def _has_counted(self) -> bool:
        return self._former != Counters()


def removed(name: str) -> RequestError:
    """What is said to requests of a model that leaves."""
    return RequestError(f"{name} is being removed", status=404, code="model_not_found", param="model")


def _empty(model: HostedModel) -> None:
    """Give the pages back, KV first. RequestError 503 if the device keeps one: the model is awake, or as asleep as
    before, and may be asked again."""
    cache = model.cache
    cache.forget_all()
    cache.forget_bytes(cache.bands()["mapped"])
    model.engine.leave_pages()
    if stuck := cache.bands()["kv_spare"]:
        raise _stays(model, f"the device kept {stuck} bytes of its KV cache")
    if model.loaded is not None and model.loaded.weights.state != "deep":
        try:
            model.engine.doze(DEEP)
        except RequestError as error:
            raise _stays(model, error.message) from error


def _stays(model: HostedModel, reason: str) -> RequestError:
    text = f"{model.name} is not removed: {reason}; try again"
    return RequestError(text, status=503, code="remove_failed", retry_after=RETRY_SECONDS)
