"""What the routes share: the engine's client, the model's names, who may come in. Knows no HTTP.

Readiness has four phases: loading → ready → draining → gone; only *ready* takes requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from xllm_cli.core import Ready
from xllm_cli.errors import RequestError
from xllm_cli.server.engine_client import EngineClient
from xllm_cli.server.tokenizer import Tokenizer

MAX_BODY_BYTES = 32 << 20


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
    """The API process as the routes see it. `tokenizer` is None until it is loaded."""

    client: EngineClient
    model: ServedModel
    max_concurrent_requests: int
    max_body_bytes: int = MAX_BODY_BYTES
    tokenizer: Tokenizer | None = None
    draining: bool = False
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

    def serving(self) -> tuple[Tokenizer, Ready]:
        """The tokenizer and the engine's description. RequestError 503 in any phase but ready."""
        if self.phase != "ready":
            raise self._refusal()
        assert self.tokenizer is not None and self.client.ready is not None
        return self.tokenizer, self.client.ready

    def admit(self) -> Slot:
        """A place for one HTTP request, as `check_admission`."""
        self.check_admission()
        return Slot(self)

    def check_admission(self) -> None:
        """RequestError 503 when not ready, 429 when all places are taken."""
        self.serving()
        if 0 < self.max_concurrent_requests <= self.open_requests:  # 0 is no limit
            raise RequestError(
                f"{self.open_requests} requests are open, the limit of max_concurrent_requests; try again",
                status=429,
                code="too_many_requests",
                retry_after=1,
            )

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
