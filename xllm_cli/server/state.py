"""What the routes share: the engine's client, the models, whether there is room. Knows no HTTP.

Readiness has four phases: loading → ready → draining → gone. *ready* takes requests, and so does *draining* until
`is_closed`: load balancers need a moment to notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from xllm_cli.errors import RequestError
from xllm_cli.flags import ServiceConfig
from xllm_cli.server.engine_client import EngineClient
from xllm_cli.server.instruments import Instruments
from xllm_cli.server.served import Models, Served, ServedModel


@dataclass(slots=True)
class ServerState:
    """The API process as the routes see it. `settings` is the configuration as it may be shown, by section and
    flag."""

    client: EngineClient
    models: Models
    service: ServiceConfig
    instruments: Instruments
    settings: Mapping[str, Any]
    draining: bool = False
    is_closed: bool = False
    open_requests: int = 0

    @property
    def phase(self) -> str:
        """loading, ready, draining or gone."""
        if self.client.failure is not None:
            return "gone"
        if self.draining:
            return "draining"
        return "ready" if self.models.first.ready is not None else "loading"

    def state_of(self, model: ServedModel) -> str:
        """awake, light, deep, parked or falling asleep, as the engine last said; loading before that; leaving while an
        order that it leaves is under way."""
        if model.num_removals:
            return "leaving"
        snapshot = self.client.snapshot
        facts = snapshot.memory.models.get(model.model_id, {}) if snapshot is not None else {}
        return str(facts.get("state", "loading" if model.ready is None else "awake"))

    def is_paused(self, model: ServedModel) -> bool:
        """Whether its requests wait for POST /resume, as the engine last said."""
        snapshot = self.client.snapshot
        activity = snapshot.models.get(model.model_id) if snapshot is not None else None
        return activity is not None and activity.is_paused

    def is_gone(self, model: ServedModel) -> bool:
        """The engine, as it last said, does not have it: the answer to an order that it leaves came too late."""
        snapshot = self.client.snapshot
        return snapshot is not None and bool(snapshot.models) and model.model_id not in snapshot.models

    def forget(self, model: ServedModel) -> None:
        """It is gone: it is listed, found and measured no more."""
        if self.models.drop(model):
            self.instruments.forget(model.model_id)

    def named(self, name: str | None) -> str:
        """The id of a model that an order names; "" where it names none, and means all of them. RequestError 404."""
        return self.models.find(name, "model_id").model_id if name else ""

    def serving(self, name: str | None = None) -> Served:
        """The model of this name, ready to be asked; none or an empty name means the first. RequestError 503 while
        there is none or the server stops, 404 for a name that no model here has."""
        if self.phase in ("loading", "gone") or self.is_closed:
            raise self._refusal()
        model = self.models.find(name)
        if model.tokenizer is None or model.ready is None:
            raise self._refusal()
        return Served(model, model.tokenizer, model.ready)

    def admit(self) -> Slot:
        """A place for one HTTP request, as `check_admission`."""
        self.check_admission()
        return Slot(self)

    def check_admission(self) -> None:
        """RequestError 503 when not ready, 429 when all places are taken."""
        self.serving()
        if 0 < self.service.max_concurrent_requests <= self.open_requests:  # 0 is no limit
            raise RequestError(
                f"{self.open_requests} requests are open, the limit of max_concurrent_requests; try again",
                status=429,
                code="too_many_requests",
                retry_after=1,
            )

    def health(self) -> tuple[dict[str, Any], int]:
        """The body and status of /health and the other readiness probes."""
        if self.phase == "loading":
            phase = self.client.loading.phase if self.client.loading else "starting"
            return {"status": "loading", "phase": phase, "seconds": round(self.client.loading_seconds(), 2)}, 503
        if self.phase != "ready":
            return {"status": "unhealthy", "reason": self.phase}, 503
        snapshot = self.client.snapshot
        if snapshot is not None and not snapshot.healthy:
            return {"status": "unhealthy", "reason": snapshot.reason}, 503
        return {"status": "healthy", "state": self.state_of(self.models.first)}, 200

    def liveness(self) -> tuple[dict[str, Any], int]:
        """The body and status of /livez: the engine lives and has been heard of lately."""
        silent = self.client.silent_seconds()
        if self.phase == "gone" or silent > self.service.liveness_timeout_secs:
            return {"status": "unhealthy", "silent_seconds": round(silent, 1)}, 503
        return {"status": "alive"}, 200

    def _refusal(self) -> RequestError:
        match self.phase:
            case "gone":
                return RequestError("the engine is gone", status=503, code="engine_dead")
            case "draining":
                return RequestError("the server is shutting down", status=503, code="shutting_down", retry_after=5)
            case _:
                phase = self.client.loading.phase if self.client.loading else "starting"
                return RequestError(
                    f"the model is still loading ({phase})", status=503, code="model_loading", retry_after=5
                )


class Slot:
    """One admitted HTTP request; `release` is idempotent."""

    def __init__(self, state: ServerState) -> None:
        self._state: ServerState | None = state
        state.open_requests += 1

    def release(self) -> None:
        if self._state is not None:
            self._state.open_requests -= 1
            self._state = None

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Release unless the block ends well; then the answer that follows owns the slot."""
        try:
            yield
        except BaseException:
            self.release()
            raise
