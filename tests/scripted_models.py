"""The named models of the scripted engine: what commands do to them, and how they look in a snapshot.

A model folder's config.json may hold a script: {"script": {"error": [status, code], "delay": seconds}} is what a fork
or an update from it comes to.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xllm_cli.core import (
    Command,
    Counters,
    Done,
    ErrorInfo,
    Fork,
    ModelActivity,
    Pause,
    Ready,
    Remove,
    Resume,
    SetLimit,
    Sleep,
    Snapshot,
    UpdateWeights,
    VmmReport,
    Wake,
)
from xllm_cli.errors import RequestError
from xllm_cli.server.tokenizer import Tokenizer

CONTEXT, VOCAB, EOS = 512, 320, 257
MIB = 1 << 20
STATES = ("awake", "light", "deep")


@dataclass
class ScriptedModel:
    """One model; `nbytes` of weights are in the pool while it is awake."""

    model_id: str
    path: Path
    nbytes: int = 0
    state: str = "awake"
    is_paused: bool = False
    limit: int | None = None
    num_running: int = 0
    counters: dict[str, int] = field(
        default_factory=lambda: {"generation_tokens": 0, "prompt_tokens_computed": 0, "steps": 0}
    )

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer.from_folder(self.path)

    @property
    def script(self) -> dict[str, Any]:
        return script_of(self.path)

    def ready(self, snapshot: Snapshot) -> Ready:
        return Ready(
            model_id=self.model_id, architecture="Scripted", dtype="float32", max_model_len=CONTEXT, vocab_size=VOCAB,
            eos_token_ids=(EOS,), capacity_tokens=CONTEXT, snapshot=snapshot,
        )  # fmt: skip

    def activity(self) -> ModelActivity:
        return ModelActivity(
            counters=Counters(**self.counters), state=self.state, is_paused=self.is_paused, num_running=self.num_running
        )

    def facts(self) -> dict[str, int | str]:
        return {
            "state": self.state,
            "kv_mapped": 2 * MIB,
            "kv_live": MIB * self.num_running,
            "bytes_per_block": self.script.get("bytes_per_block", MIB),
            "weights": self.nbytes if self.state == "awake" else 0,
            **({} if self.limit is None else {"limit": self.limit}),
        }


def script_of(folder: str | Path) -> dict[str, Any]:
    script: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text()).get("script", {})
    return script


class ScriptedModels:
    """All models, the first one first; `nbytes` are each one's weights in the pool, `limit` is that of all KV."""

    def __init__(self, model_id: str, path: Path, nbytes: int) -> None:
        self._nbytes = nbytes
        self.first = ScriptedModel(model_id, path, nbytes)
        self._models = {model_id: self.first}
        self.limit: int | None = None

    def find(self, model_id: str) -> ScriptedModel:
        if model_id and model_id not in self._models:
            raise RequestError("the engine has no such model", status=404, code="model_not_found")
        return self._models[model_id] if model_id else self.first

    def count_running(self, running: Mapping[str, int]) -> None:
        for name, model in self._models.items():
            model.num_running = running.get(name, 0)

    def carry_out(self, command: Command) -> Done:
        """As the engine answers; what a command takes is told in MiB of weights."""
        started, error, ready, model = time.monotonic(), None, None, None
        held, before = self.weights(), "absent"
        try:
            if isinstance(command, Remove):
                before = self.remove(command)
            elif isinstance(command, Fork):
                before = self._models[command.model].state if command.model in self._models else before
                model, ready = self.fork(command)
            else:
                model = self.find(command.model)
                before = model.state
                self.change(model, command)
        except RequestError as refused:
            error = ErrorInfo(refused.message, refused.status, refused.code, refused.param, refused.retry_after)
        change, after = self.weights() - held, "absent" if model is None else model.state
        return Done(
            command_id=command.command_id, seconds=time.monotonic() - started, snapshot=self.snapshot(),
            freed=max(0, -change), taken=max(0, change), before=before, after=after, error=error, ready=ready,
        )  # fmt: skip

    def fork(self, command: Fork) -> tuple[ScriptedModel, Ready]:
        self.play(command.model_path)
        if command.model not in self._models:
            made = ScriptedModel(command.model, Path(command.model_path), self._nbytes, STATES[command.level])
            self._models[command.model] = made
        model = self._models[command.model]
        return model, model.ready(self.snapshot())

    def remove(self, command: Remove) -> str:
        model = self.find(command.model)
        if model is self.first:
            raise RequestError("the first model stays", status=409, code="first_model")
        if model.num_running and command.mode == "refuse":
            raise RequestError("requests are running", status=409, code="model_busy")
        self.play(model.path)
        del self._models[command.model]
        return model.state

    def play(self, path: str | Path) -> None:
        script = script_of(path)
        time.sleep(script.get("delay", 0))
        if "error" in script:
            status, code = script["error"]
            raise RequestError("what it lacks, with numbers", status=status, code=code, retry_after=1)

    def change(self, model: ScriptedModel, command: Command) -> None:
        every = [model] if command.model else self._models.values()
        match command:
            case Sleep(level=level, park=park):
                self.move(model, "parked" if park else STATES[level])
            case Wake():
                self.move(model, "awake")
            case UpdateWeights(model_path=path):
                self.play(path or model.path)
                model.path = Path(path or model.path)
            case Pause() | Resume():
                for one in every:
                    one.is_paused = isinstance(command, Pause)
            case SetLimit(bytes=nbytes):
                whose: ScriptedModel | ScriptedModels = model if command.model else self
                whose.limit = nbytes

    def move(self, model: ScriptedModel, state: str) -> None:
        if model.state == state:
            code = "already_awake" if state == "awake" else "already_asleep"
            raise RequestError(f"the model is already {state}", status=409, code=code)
        model.state = state

    def weights(self) -> int:
        return sum(int(model.facts()["weights"]) for model in self._models.values())

    def snapshot(self) -> Snapshot:
        models = self._models
        totals = {name: sum(m.counters[name] for m in models.values()) for name in self.first.counters}
        live = sum(int(model.facts()["kv_live"]) for model in models.values())
        mapped = 2 * MIB + live + self.weights()
        memory = VmmReport(
            mapped=mapped, kv_idle=2 * MIB, kv_live=live, possible=4 * MIB, limit=self.limit, weights=self.weights(),
            ranks=[{"mapped": mapped}], models={name: model.facts() for name, model in models.items()},
        )  # fmt: skip
        return Snapshot(
            memory=memory, counters=Counters(**totals), num_running=sum(m.num_running for m in models.values()),
            models={name: model.activity() for name, model in models.items()},
        )  # fmt: skip
