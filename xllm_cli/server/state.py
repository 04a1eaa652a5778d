"""What the routes share: the engine's client, the model's names, whether there is room. Knows no HTTP.

Readiness has four phases: loading → ready → draining → gone. *ready* takes requests, and so does *draining* until
`is_closed`: load balancers need a moment to notice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xllm_cli.core import Ready
from xllm_cli.errors import RequestError
from xllm_cli.flags import ServiceConfig
from xllm_cli.server.engine_client import EngineClient
from xllm_cli.server.instruments import Instruments

if TYPE_CHECKING:
    from xllm_cli.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model's name and what else it answers to."""

    model_id: str
    aliases: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model_id: str, path: str) -> ServedModel:
        """The path as typed is an alias, also without the slashes that URLs lose."""
        return cls(model_id, frozenset({path, path.rstrip("/"), path.strip("/"), os.path.abspath(path)}))

    def check(self, name: str | None) -> None:
        """RequestError 404 for another model's name; none or an empty name means this model."""
        if name and name != self.model_id and name not in self.aliases and name.rstrip("/") not in self.aliases:
            raise RequestError(
                f"no such model here; this server has {self.model_id}",
                status=404,
                code="model_not_found",
                param="model",
            )


@dataclass(slots=True)
class ServerState:
    """The API process as the routes see it. `tokenizer` is None until it is loaded; `settings` is the configuration
    as it may be shown, by section and flag."""

    client: EngineClient
    model: ServedModel
    service: ServiceConfig
    instruments: Instruments
    settings: Mapping[str, Any]
    tokenizer: Tokenizer | None = None
    draining: bool = False
    is_closed: bool = False
    open_requests: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def phase(self) -> str:
        """loading, ready, draining or gone."""
        if self.client.failure is not None:
            return "gone"
        if self.draining:
            return "draining"
        return "ready" if self.tokenizer is not None and self.client.ready is not None else "loading"

    @property
    def model_state(self) -> str:
        """awake, light, deep, parked or falling asleep, as the engine last said; loading before that."""
        snapshot = self.client.snapshot
        facts = snapshot.memory.models.get(self.model.model_id, {}) if snapshot is not None else {}
        return str(facts.get("state", "loading" if self.client.ready is None else "awake"))

    def serving(self) -> tuple[Tokenizer, Ready]:
        """The tokenizer and the engine's description. RequestError 503 while there is none or the server stops."""
        if self.phase in ("loading", "gone") or self.is_closed or self.tokenizer is None:
            raise self._refusal()
        assert self.client.ready is not None
        return self.tokenizer, self.client.ready

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
        return {"status": "healthy", "state": self.model_state}, 200

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
