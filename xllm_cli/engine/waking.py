"""Models that wake while others go on: in slices, since a copy of hundreds of MiB or a reading of a checkpoint takes
long.

    a wake-up   [ waits for another's ][ pages, pages ]·[ pages ]·[ pages, awake ]     · the others' steps

Its state changes with the last slice; one that fails or is called off leaves nothing behind. A model that is being
woken is asleep to requests, and neither woken nor put to sleep. Owns which way a wake-up goes; how pages come back is
worker/weights.py's business, who gives memory up for it room.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from xllm_cli.engine.hosted import HostedModel
from xllm_cli.engine.joining import Joining
from xllm_cli.engine.room import Room
from xllm_cli.engine.slices import Sliced
from xllm_cli.errors import RequestError

LANE = "waking"  # one after the other, by turns with what joins


class Waking:
    """Wake-ups of the models of a host. `models` are all, whoever comes and goes meanwhile."""

    def __init__(self, joining: Joining, room: Room) -> None:
        self._joining = joining
        self._room = room

    def wake(self, model: HostedModel, models: Collection[HostedModel]) -> None:
        """At once. RequestError 409 if it is awake, about to sleep or being woken, 503 if the others cannot give what
        it lacks."""
        model.engine.check_wake()
        self._wake(model, models)

    def begin(self, model: HostedModel, models: Collection[HostedModel]) -> Sliced[None]:
        """wake(), in slices unless nothing has to be copied or there is nobody to go on. RequestError 409 at once."""
        model.engine.check_wake()
        return self._begin(model, lambda: self._wake(model, models), is_alone=len(models) == 1)

    def stir(self, model: HostedModel, models: Collection[HostedModel]) -> None:
        """As begin(), for requests that wait for it, if there is memory: else the next step finds out and says so.
        Nothing is done if all have gone before it begins."""

        def work() -> None:
            if model.engine.has_work:
                self._settle(model, models)
                model.engine.stir()

        if model.engine.wants_to_wake and model.engine.may_wake:
            self._begin(model, work, is_alone=len(models) == 1)

    def _begin(self, model: HostedModel, work: Callable[[], None], *, is_alone: bool) -> Sliced[None]:
        def guarded() -> None:
            try:
                work()
            finally:
                model.engine.is_waking = False

        if _is_short(model) or (is_alone and not self._joining.is_busy):
            slices = Sliced(work, model.name)
            slices.finish()
            return slices
        model.engine.is_waking = True
        return self._joining.begin(guarded, model.name, LANE)

    def _wake(self, model: HostedModel, models: Collection[HostedModel]) -> None:
        self._settle(model, models)
        try:
            model.engine.bring_back()
        except RequestError:
            missing = model.engine.needs.of_weights
            if not missing or not self._room.make(model, missing, models):
                raise
            self._settle(model, models)
            model.engine.bring_back()

    def _settle(self, model: HostedModel, models: Collection[HostedModel]) -> None:
        """Wait until no other name brings the same weights back, and see what is there then."""
        while model.loaded is not None and model.loaded.weights.are_coming:
            self._joining.wait()
        if not _is_short(model):
            model.look((other for other in models if other is not model), self._joining.asks)


def _is_short(model: HostedModel) -> bool:
    """Its pages need only be mapped, if that."""
    weights = None if model.loaded is None else model.loaded.weights
    return weights is None or not (weights.bytes_to_wake or weights.are_coming)
