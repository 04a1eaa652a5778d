"""Named models over one pool, to the loop as one engine.

A round: every model that has something due takes a step, those with rows one at a time, whose turn it is (turns.py);
then whoever lacks memory is seen to (room.py). With one model a round is that model's step and nothing else.

Owns which models there are. How one is built is start.py's, what a step does the engine's business.

Longer than other files: all that may be asked of an engine is here once more, of one of them or of all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Literal

from xllm_cli.core import Output, Ready, Request, Snapshot, StepEvents
from xllm_cli.engine.engine import Engine
from xllm_cli.engine.hosted import HostedModel
from xllm_cli.engine.joining import Joining
from xllm_cli.engine.leaving import Departure, Leaving, removed
from xllm_cli.engine.parts import Start
from xllm_cli.engine.report import together
from xllm_cli.engine.room import Room
from xllm_cli.engine.sequence import refusal
from xllm_cli.engine.slices import Sliced
from xllm_cli.engine.slumber import Bed, Mode
from xllm_cli.engine.start import Built
from xllm_cli.engine.steps import Steps
from xllm_cli.engine.turns import Turns
from xllm_cli.engine.waking import Waking
from xllm_cli.errors import RequestError
from xllm_cli.neighbours.peers import PeerCounters

log = logging.getLogger("xllm.engine")

BUSY_SLICE, IDLE_SLICE = 0.02, 0.1  # seconds between two rounds for what joins, beside requests and without any


class Host(Steps):
    """submit, abort, step and snapshot as Engine, over all models; and verbs that name one."""

    def __init__(self, start: Start, built: Built, clock: Callable[[], float] = time.monotonic) -> None:
        """`built` is the first model, made from `start`."""
        flags = start.config.vmm
        self._clock = clock
        self._room = Room(auto_sleep=flags.auto_sleep, auto_wake=flags.auto_wake, clock=clock)
        self._joining = Joining(start, built, self._room)
        self._waking = Waking(self._joining, self._room)
        self._leaving = Leaving(start.pool)
        first = HostedModel(built.ready.model_id, start.config.model.model, built, clock())
        self._models = {first.name: first}
        self._turns: Turns[HostedModel] = Turns()
        self._touched: set[HostedModel] = set()
        self._stepped_last = first

    @property
    def ready(self) -> Ready:
        """What to tell clients of the first model."""
        return self._find("").ready

    # --- one of them

    def engine(self, model: str) -> Engine:
        """Its engine; "" is the first's. RequestError 404 if there is none such."""
        return self._find(model).engine

    def touch(self, model: str) -> None:
        """Something was asked of it ("": of all): it takes a step in the next round."""
        self._touched.update([self._find(model)] if model else self._models.values())

    def _find(self, model: str) -> HostedModel:
        if not model:
            return next(iter(self._models.values()))
        if model not in self._models:
            text = f"no model {model!r} here; there are {', '.join(self._models)}"
            raise RequestError(text, status=404, code="model_not_found", param="model")
        return self._models[model]

    def _staying(self, model: str) -> HostedModel:
        """As _find(); RequestError 404 for one that is about to leave, too."""
        found = self._find(model)
        if found.is_leaving:
            raise removed(found.name)
        return found

    def submit(self, request: Request) -> Output | None:
        """See Engine."""
        try:
            found = self._staying(request.model)
        except RequestError as error:
            return refusal(request.request_id, error)
        self._touched.add(found)
        found.last_used = self._clock()
        return found.engine.submit(request)

    def engines(self, model: str) -> list[Engine]:
        """Its engine; "" are all. RequestError as engine()."""
        return [self.engine(model)] if model else self._engines

    def wake(self, model: str) -> None:
        """Bring a model's weights back; what they lack is taken from the others. RequestError as Engine.wake()."""
        self._waking.wake(self._staying(model), self._models.values())

    def begin_wake(self, model: str) -> Sliced[None]:
        """wake(), in slices before each of the next rounds if others are there. RequestError 409 at once."""
        return self._waking.begin(self._staying(model), self._models.values())

    def begin_fork(self, name: str, path: str, level: int = 0) -> Sliced[Ready]:
        """fork(), in slices before each of the next rounds; what begins later waits for it."""
        return self._joining.begin(lambda: self.fork(name, path, level), name)

    def begin_update(self, name: str, path: str = "") -> Sliced[None]:
        """update(), likewise."""
        model = self._staying(name)
        return self._joining.begin(lambda: self.update(model.name, path), model.name)

    def fork(self, name: str, path: str, level: int = 0) -> Ready:
        """Serve the checkpoint at `path` as `name`, too. What is there already is left as it is.

        RequestError 409 if that is another model's name, 400 if the checkpoint cannot be served, 503 with the numbers
        if there is no memory; nothing has changed then.
        """
        present = self._models.get(name)
        if present is not None:
            if present.is_leaving:
                text = f"{name} is being removed: wait until it is gone"
                raise RequestError(text, status=409, code="model_changing", param="model_id")
            if not present.is_named_by(path):
                text = f"{name!r} is the name of the model from {present.path}: give another model_id"
                raise RequestError(text, status=409, code="model_exists", param="model_id")
            return present.ready
        self._look_everywhere()
        built = self._joining.fork(name, path, self._models.values())
        made = self._models[name] = HostedModel(name, path, built, self._clock())
        self._touched.update(self._models.values())
        if level:
            self._lay_down(made, level)
        return made.ready

    def _lay_down(self, made: HostedModel, level: int) -> None:
        """It was forked to sleep. If it cannot, it is there all the same."""
        made.look(self._others(made), self._joining.asks)
        try:
            made.engine.sleep(Bed(level))
        except RequestError as error:
            log.warning("%s was forked and cannot sleep: %s", made.name, error.message)

    def update(self, name: str, path: str = "") -> None:
        """Exchange a model's weights for those of `path`, "" being where it came from.

        RequestError 409 if it sleeps, 400 if the checkpoint does not fit the model, 503 with the numbers if there is
        no memory for both; the old weights stay then.
        """
        model = self._staying(name)
        self._look_everywhere()
        self._joining.update(model, path or model.path, self._models.values())
        model.engine.read_words_from(model.path)
        self._touched.update(self._models.values())

    def begin_remove(self, name: str, mode: Mode = "refuse") -> Departure:
        """remove(), once the open requests have ended, if they may: with the end of the round in which the last does.

        RequestError 409 if they may not, for the first model, and for one that is being forked, updated or woken; 404
        if there is none such.
        """
        if self._is_changing(name):
            text = f"{name} is being forked, updated or woken: wait until that has ended"
            raise RequestError(text, status=409, code="model_changing", param="model")
        model = self._find(name)
        if model is self._find(""):
            text = (
                f"{model.name} is the model that the server started with: it stays. To have its memory, put it to "
                f"sleep: POST /sleep with level 2, or xllm sleep {model.name} --level=2"
            )
            raise RequestError(text, status=409, code="first_model", param="model")
        departure = self._leaving.begin(model, mode)
        self._touched.add(model)
        return departure

    def remove(self, name: str, mode: Literal["refuse", "abort"] = "refuse") -> str:
        """Take a model out, with all that it holds; its name is free then. Requests that it ends are told with the next
        round. Returns what is worth telling, such as that the device is slow to take addresses back.

        RequestError as begin_remove(), and 503 if the device keeps a page: the model stays then.
        """
        departure = self.begin_remove(name, mode)
        self._let_leave()
        return departure.result()

    def _is_changing(self, name: str) -> bool:
        """It is being forked, updated or woken, or another is forked that shares its weights."""
        model = self._models.get(name)
        return self._joining.is_about(name, None if model is None else model.loaded)

    def _let_leave(self) -> None:
        for gone in self._leaving.go_on(self._is_changing):
            del self._models[gone.name]
            self._turns.forget(gone)
            self._touched.discard(gone)
            if self._stepped_last is gone:
                self._stepped_last = self._find("")
            for model in self._models.values():
                model.engine.gives_way = False  # it may have been for the one that is gone
            self._look_everywhere()
            self._touched.update(self._models.values())
            log.info("%s is gone", gone.name)

    # --- all of them

    def step(self) -> StepEvents:
        """One round, after a slice of what joins or wakes."""
        if self._joining.is_busy:
            is_anybody_up = any(engine.can_run for engine in self._engines)
            self._joining.advance(BUSY_SLICE if is_anybody_up else IDLE_SLICE)
            self._look_everywhere()
        if len(self._models) == 1 and not self._joining.is_busy:
            self._touched.clear()
            return self._leaving.told(self._stepped_last.engine.step())
        outputs: list[Output] = []
        seconds: float | None = None
        stepped = self._due()
        for model in stepped:
            if model is not self._stepped_last:
                model.look(self._others(model), self._joining.asks)
                self._stepped_last = model
            self._waking.stir(model, self._models.values())
            began = self._clock()
            events = model.engine.step()
            now = self._clock()
            self._turns.ran(model, now - began)
            model.has_seen(now)
            outputs += events.outputs
            if events.map_seconds is not None:
                seconds = (seconds or 0.0) + events.map_seconds
        self._look_everywhere(only=[model for model in stepped if model.engine.needs.of_pool])
        is_anybody_short = any(engine.needs.of_pool for engine in self._engines)
        helped = self._room.settle(stepped, list(self._models.values()))
        # what moved since the last step is in no observation yet, and the snapshot is made of the latest
        self._look_everywhere(only=[*helped, self._stepped_last] if is_anybody_short else helped)
        self._touched.update(helped)
        self._let_leave()
        return StepEvents(outputs + self._leaving.take_late(), self.snapshot(), seconds)

    def _due(self) -> list[HostedModel]:
        """Those without rows that wait for something or have something due, and one of those with rows."""
        touched, self._touched = self._touched, set()
        models = list(self._models.values())
        running = [m for m in models if m.engine.is_running and m.engine.seconds_until_due() == 0]
        resting = [m for m in models if not m.engine.is_running]
        due = [m for m in resting if m in touched or m.engine.has_work or m.engine.seconds_until_due() == 0]
        if running:
            due.append(self._turns.next(running))
        return due or models

    def _look_everywhere(self, only: list[HostedModel] | None = None) -> None:
        for model in self._models.values() if only is None else only:
            model.look(self._others(model), self._joining.asks)

    def _others(self, model: HostedModel) -> Iterator[HostedModel]:
        return (other for other in self._models.values() if other is not model)

    def snapshot(self) -> Snapshot:
        """See Engine: of all models together, and of each."""
        if len(self._models) == 1 and not self._joining.asks:
            return self._leaving.counted(self._stepped_last.engine.snapshot())
        hosted = self._models.values()
        weights = {model.weights_id: model.loaded.weights for model in hosted if model.loaded is not None}
        found = together(
            {name: model.engine.snapshot() for name, model in self._models.items()},
            latest=self._stepped_last.name,
            weights=sum(each.mapped_bytes for each in weights.values()),
            parked=sum(each.parked_bytes for each in weights.values()),
            apart=sum(other.cache.kv_bytes - other.kv_in_pool for other in self._others(self._stepped_last)),
            has_newcomer=bool(self._joining.asks),
        )
        return self._leaving.counted(found)

    @property
    def _engines(self) -> list[Engine]:
        return [model.engine for model in self._models.values()]

    def abort(self, request_id: str) -> None:
        """See Engine."""
        for engine in self._engines:
            engine.abort(request_id)

    def abort_all(self, error: RequestError) -> list[Output]:
        """See Engine."""
        return [output for engine in self._engines for output in engine.abort_all(error)]

    def seconds_until_due(self) -> float | None:
        """See Engine."""
        if self._joining.is_busy or self._leaving.has_late or (self._touched and len(self._models) > 1):
            return 0.0
        due = [engine.seconds_until_due() for engine in self._engines]
        return min((seconds for seconds in due if seconds is not None), default=None)

    def set_limit(self, nbytes: int | None) -> None:
        """Cap the KV of all models together (None: no cap)."""
        for engine in self._engines:
            engine.set_limit(nbytes)
        self.touch("")

    def trim(self, nbytes: int | None = None) -> int:
        """Let up to `nbytes` (None: all) that no request uses leave, of all models, with the next round."""
        if len(self._models) > 1 and nbytes is not None:
            return self._room.spare(nbytes, list(self._models.values()))
        self.touch("")
        return sum(engine.trim(nbytes) for engine in self._engines)

    def look(self) -> None:
        """See Engine."""
        for engine in self._engines:
            engine.look()

    def report_neighbours(self, counters: PeerCounters) -> None:
        """See Engine."""
        for engine in self._engines:
            engine.report_neighbours(counters)
        self._joining.peers = counters

    @property
    def gives_back(self) -> bool:
        """See Engine."""
        return self._stepped_last.engine.gives_back

    @property
    def short_bytes(self) -> int:
        """See Needs: of the one that is short of most."""
        now = self._clock()
        return max(engine.needs.of_device(now) for engine in self._engines)

    @property
    def ahead_bytes(self) -> int:
        """See Needs: of the one that may take most."""
        return max(engine.needs.ahead for engine in self._engines)

    @property
    def oldest_idle_at(self) -> float | None:
        """See Engine."""
        return min((at for engine in self._engines if (at := engine.needs.oldest_idle_at) is not None), default=None)

    @property
    def has_work(self) -> bool:
        """See Engine."""
        return any(engine.has_work for engine in self._engines)

    def check(self) -> None:
        """Assert every invariant of every model; for tests."""
        for model in self._models.values():
            model.engine.check()
            if model.loaded is not None:
                model.loaded.weights.check()

    def close(self) -> bool:
        """End all models; False if a page or a view leaked: those are tried again by the next call. Once all has ended
        another call changes nothing."""
        self._joining.call_off()
        for model in self._models.values():
            model.loaded = None  # its tensors look at pages that are given back
        self._touched.clear()
        for name, model in reversed(list(self._models.items())):
            if model.engine.close():
                del self._models[name]
        return not self._models
