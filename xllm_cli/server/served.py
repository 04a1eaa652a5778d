"""The models of a server: what each is called, and what asking it needs. Knows neither HTTP nor the engine's socket."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from xllm_cli.core import Ready
from xllm_cli.errors import RequestError
from xllm_cli.server.instruments import ModelInstruments

if TYPE_CHECKING:
    from xllm_cli.server.tokenizer import Tokenizer

_SLASHES = re.compile("/{2,}")
MAX_LISTED = 20  # names in an error


@dataclass(slots=True)
class ServedModel:
    """A model's id, the folder it came from as typed, and what is known once it can be asked: until then `tokenizer`
    and `ready`, the engine's description, are None. `num_removals` are the orders under way that it leaves."""

    model_id: str
    path: str
    instruments: ModelInstruments
    tokenizer: Tokenizer | None = None
    ready: Ready | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    num_removals: int = 0

    def is_called(self, name: str) -> bool:
        """The path is an alias: as typed, without the slashes that URLs lose, and whole."""
        path = self.path
        aliases = (path, path.rstrip("/"), path.strip("/"), os.path.abspath(path))
        return name == self.model_id or name in aliases or name.rstrip("/") in aliases


class Served(NamedTuple):
    """A model that can be asked."""

    model: ServedModel
    tokenizer: Tokenizer
    ready: Ready

    @property
    def model_id(self) -> str:
        return self.model.model_id


class Models:
    """The models by name. The first is the server's own; it is there from the start, the others once they serve."""

    def __init__(self, first: ServedModel) -> None:
        self.first = first
        self._others: dict[str, ServedModel] = {}

    def __iter__(self) -> Iterator[ServedModel]:
        yield self.first
        yield from self._others.values()

    def get(self, model_id: str) -> ServedModel | None:
        """The model with exactly this id."""
        return self.first if model_id == self.first.model_id else self._others.get(model_id)

    def of_url(self, name: str) -> ServedModel | None:
        """The model with this id, as far as a URL's path can tell ids apart: slashes at the ends, and doubled ones, are
        lost on their way."""
        alike = (model for model in self if _SLASHES.sub("/", model.model_id).strip("/") == name)
        return self.get(name) or next(alike, None)

    def find(self, name: str | None, param: str = "model") -> ServedModel:
        """The model of this name, an id before a path; none or an empty name means the first. RequestError 404 that
        names those there are."""
        if not name:
            return self.first
        found = self.get(name) or next((model for model in self if model.is_called(name)), None)
        if found is None:
            ids = [model.model_id for model in self]
            more = f" and {len(ids) - MAX_LISTED} more" if len(ids) > MAX_LISTED else ""
            text = f"no such model here; this server has {', '.join(ids[:MAX_LISTED])}{more}"
            raise RequestError(text, status=404, code="model_not_found", param=param)
        return found

    def add(self, model: ServedModel) -> None:
        """Let a model be found from now on."""
        assert self.get(model.model_id) is None, "an id names one model"
        self._others[model.model_id] = model

    def drop(self, model: ServedModel) -> bool:
        """Let a model be found no more; False if it is not there."""
        if self.get(model.model_id) is not model or model is self.first:
            return False
        del self._others[model.model_id]
        return True
