"""Another model in the pool, or other weights for one that is there: room first, then all of it or nothing.

Owns what a fork and an update share: where a checkpoint's weights may come from, and what is said when there is no
memory. Knows no request.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from xllm_cli.cache.manager import CacheManager
from xllm_cli.engine.hosted import HostedModel, tell
from xllm_cli.engine.parts import Start, load_weights
from xllm_cli.engine.room import Room
from xllm_cli.engine.slices import Sliced, forget_frames
from xllm_cli.engine.slumber import weights_required
from xllm_cli.engine.start import Built, Meet, build, explained
from xllm_cli.errors import DeviceError, MemoryShortage, ModelError, RequestError
from xllm_cli.loading import open_checkpoint
from xllm_cli.models.registry import load_config
from xllm_cli.neighbours.peers import PeerCounters
from xllm_cli.vmm.pool import PagePool
from xllm_cli.worker.exhaustion import bytes_refused
from xllm_cli.worker.shared_observer import SharedObserver
from xllm_cli.worker.sharing import Loaded, WeightsShare
from xllm_cli.worker.weights import WeightsError

log = logging.getLogger("xllm.engine")

Made = TypeVar("Made")
RETRY_SECONDS = 1


class Joining:
    """Forks and updates over what the first model started from. `models` are all, the first one first, whoever comes
    and goes while something is done in slices."""

    def __init__(self, start: Start, first: Built, room: Room) -> None:
        self._slices = start.slices
        self._start = replace(
            start,
            progress=lambda phase: log.info("another model: %s", phase),
            observer=SharedObserver(first.observer),
        )
        self._limits = first.cache.limits
        self._room = room
        self.peers = PeerCounters()
        self._copied: Loaded | None = None  # what a fork in the middle shares
        self.asks = 0  # bytes that are being filled, of which nobody's books know yet

    # --- in slices

    def begin(self, work: Callable[[], Made], name: str, lane: str = "joining") -> Sliced[Made]:
        """`work` forks, updates or wakes the model of this name; it is done in slices, after what began in its lane
        before, so that the others go on, where threads are all the same to the device."""
        slices = Sliced(work, name)
        if self._start.device.is_host:
            self._slices.add(slices, lane)
        else:
            slices.finish()
        return slices

    @property
    def is_busy(self) -> bool:
        """Something that began has not ended."""
        return bool(self._slices)

    def is_about(self, name: str, loaded: Loaded | None = None) -> bool:
        """Something that began and has not ended is about the model of this name, or shares what it has loaded."""
        return name in self._slices.names or (loaded is not None and loaded is self._copied)

    def advance(self, seconds: float) -> None:
        """Let some of what began go on for about so long."""
        self._slices.advance(seconds)

    def wait(self) -> None:
        """What began must go on before the caller can."""
        self._slices.wait()

    def call_off(self) -> None:
        """End what began, with nothing left behind."""
        self._slices.call_off()

    # --- at once

    def fork(self, name: str, path: str, models: Collection[HostedModel]) -> Built:
        """The model at `path` under another name; its weights are those of a model from the same files, if there is
        one. RequestError if it cannot be, with nothing left behind."""
        self._need_pages()
        while (twin := _twin(path, models)) is not None and twin.weights.are_coming:
            self._slices.wait()
        start = self._start.beside(self._limits, path, name, twin, ExitStack())
        start = replace(start, promised=sum(model.cache.kv_bytes - model.kv_in_pool for model in models))
        wants = self._bytes_of(path) if twin is None else twin.weights.bytes_to_wake
        self._copied = twin
        try:
            built = self._make(lambda start: build(start, _meeting(models)), start, models, wants=wants)
        finally:
            self._copied = None
        built.engine.report_neighbours(self.peers)
        return built

    def update(self, model: HostedModel, path: str, models: Collection[HostedModel]) -> None:
        """The weights at `path` for a model; RequestError if they cannot be had, with the old ones in their place."""
        pool = self._need_pages()
        if model.engine.model_state != "awake" or model.loaded is None:
            text = f"{model.name} is {model.engine.model_state}: wake it before its weights are exchanged"
            raise RequestError(text, status=409, code="model_sleeping")
        start = self._start.beside(self._limits, path, model.name, None, ExitStack())
        self._check_form(model, path)
        wants = model.loaded.weights.nbytes
        loaded = self._make(lambda start: load_weights(start, pool), start, models, wants=wants, but=model)
        weights, before = loaded.weights, model.loaded.weights
        if (refused := self._exchange(model, loaded, path)) is not None:
            del loaded
            weights.close()
            raise refused
        model.loaded, model.path = loaded, path
        before.close()
        model.stamp_files()

    def _exchange(self, model: HostedModel, loaded: Loaded, path: str) -> BaseException | None:
        """Why it could not be, whatever that is: it is raised once the new weights are let go. None if it could."""
        if model.engine.model_state != "awake":
            return RequestError(f"{model.name} was put to sleep meanwhile", status=409, code="model_sleeping")
        try:
            model.engine.exchange(loaded)
        except (MemoryShortage, DeviceError) as error:
            forget_frames(error)
            return _refusal(error, path)
        except BaseException as error:
            _tell(error)
            return error
        return None

    def _check_form(self, model: HostedModel, path: str) -> None:
        try:
            form = load_config(path)
        except ModelError as error:
            raise RequestError(str(error), code="model_invalid", param="model_path") from error
        if form != model.form:
            text = f"the checkpoint at {path} is of another form than {model.name}: their config.json must agree"
            raise RequestError(text, code="model_invalid", param="model_path")

    def _bytes_of(self, path: str) -> int:
        """What its weights will need, about: types may widen, forms be padded."""
        try:
            with closing(open_checkpoint(Path(path))) as checkpoint:
                return checkpoint.num_bytes
        except (ModelError, OSError) as error:
            raise RequestError(str(error), code="model_invalid", param="model_path") from error

    def _make(
        self,
        make: Callable[[Start], Made],
        start: Start,
        models: Collection[HostedModel],
        *,
        wants: int,
        but: HostedModel | None = None,
    ) -> Made:
        """`make` it once there is room for the bytes it `wants`; once more if it needed more than that. Room may be
        made by all `but` one."""
        missing = self._missing(wants, models)
        if missing and next(iter(models)).engine.relieve():
            missing = self._missing(wants, models)
        if missing:
            self._room.make(but, missing, models)
        self.asks = wants if start.twin is None else 0  # the twin's are in the books
        try:
            return self._make_in(make, start, models, wants=wants, but=but)
        finally:
            self.asks = 0

    def _make_in(
        self,
        make: Callable[[Start], Made],
        start: Start,
        models: Collection[HostedModel],
        *,
        wants: int,
        but: HostedModel | None,
    ) -> Made:
        made = self._attempt(make, replace(start, room=_room_for_weights(models)))
        if isinstance(made, MemoryShortage | WeightsError) and self._room.make(but, max(wants, 1), models):
            made = self._attempt(make, replace(start, room=_room_for_weights(models)))
        if isinstance(made, Exception):
            raise _refusal(made, start.config.model.model)
        start.opened.pop_all()
        return made

    def _attempt(self, make: Callable[[Start], Made], start: Start) -> Made | Exception:
        """What was made; or why it was not, once nothing of it is left. An error holds the frames that hold its memory,
        so what was opened is closed without them."""
        try:
            with explained():
                return make(start)
        except (ModelError, MemoryShortage, WeightsError, DeviceError) as error:
            failure = type(error)(str(error))
        except OSError as error:
            failure = ModelError(f"{start.config.model.model} cannot be read: {error}")
        except (RuntimeError, MemoryError) as error:  # it may be memory for what loading needs besides
            if bytes_refused(error) is None:
                self._undo_for(error, start)
                raise
            failure = MemoryShortage(f"out of memory: {error}")
        except BaseException as error:  # called off, an interrupt, a broken model file
            self._undo_for(error, start)
            raise
        self._undo(start)
        return failure

    def _undo_for(self, error: BaseException, start: Start) -> None:
        """Close what was opened. Where the error came from is said now: its frames hold the model's tensors."""
        _tell(error)
        self._undo(start)

    def _undo(self, start: Start) -> None:
        """Close what was opened."""
        gc.collect()
        start.opened.close()
        if start.pool is not None:
            start.pool.trim()

    def _need_pages(self) -> PagePool:
        """The pool that weights live in. RequestError if they do not (R4)."""
        if self._start.pool is None or not self._start.config.vmm.enable_vmm_weights:
            raise weights_required()
        return self._start.pool

    def _missing(self, nbytes: int, models: Collection[HostedModel]) -> int:
        """What of `nbytes` neither caps nor free memory leave room for now."""
        room, cache = _room_for_weights(models), next(iter(models)).cache
        seen = cache.observations[0]
        free = seen.free_handles + (seen.free - cache.keep_free() if cache.limits.elastic else 0)
        return max(0, nbytes - min(free, room))


def _tell(error: BaseException) -> None:
    """Say where an error came from, now: nobody will know later, for its frames hold a model's tensors."""
    if isinstance(error, Exception):
        log.error("a model could not be made:\n%s", traceback.format_exc())
    forget_frames(error)


def _twin(path: str, models: Collection[HostedModel]) -> Loaded | None:
    """Weights from the same files, if there are some."""
    return next((model.loaded for model in models if model.comes_from(path)), None)


def _meeting(models: Collection[HostedModel]) -> Meet:
    """What a newcomer's books are told of these."""

    def meet(cache: CacheManager, weights: WeightsShare | None) -> None:
        tell(cache, models, weights)
        cache.set_limit(next(iter(models)).cache.limits.limit)

    return meet


def _room_for_weights(models: Collection[HostedModel]) -> int:
    """What the caps on all models leave, as of now."""
    first, *others = models
    first.look(others)
    return first.cache.room_for_weights()


def _refusal(error: Exception, path: str) -> RequestError:
    if isinstance(error, ModelError):
        return RequestError(str(error), code="model_invalid", param="model_path")
    text = f"no memory for the model at {path}: {error}"
    return RequestError(text, status=503, code="model_memory_unavailable", retry_after=RETRY_SECONDS)
