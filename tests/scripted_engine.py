"""A small engine that does what a prompt tells it: the peer of the API process in tests of the protocol and its faults.

It speaks the same messages over the same sockets as the real engine. A prompt that holds a JSON object is a script:

    say      text or token ids to generate; default: the prompt itself
    finish   how it ends, "stop" or "length"; default "length"
    at       token index at which something happens: error, die, garble, mute
    error    [status, code] of an error sent there        die     exit status to end with there
    garble   send bytes that are no message there         mute    say nothing more
    endless  never end                                    delay   seconds between steps
    per_step tokens in each output                        logprobs are made up: -(token id) / 100

Requests to a model that sleeps are refused, to one that is paused they wait. What becomes of its models, and how, is in
scripted_models.py.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
from scripted_models import MIB, ScriptedModel, ScriptedModels

from xllm_cli.core import (
    Abort,
    ErrorInfo,
    Fatal,
    FromEngine,
    Heartbeat,
    Loading,
    Output,
    Request,
    Shutdown,
    Snapshot,
    StepEvents,
    ToEngine,
    TokenLogprob,
)
from xllm_cli.errors import RequestError


@dataclass
class Running:
    """One request and how far its script is."""

    request: Request
    model: ScriptedModel
    script: dict[str, Any]
    tokens: list[int]
    done: int = 0
    due: float = field(default_factory=time.monotonic)


class ScriptedEngine:
    def __init__(self, folder: Path, death_fd: int) -> None:
        config = json.loads((folder / "config.json").read_text())
        path = Path(config["model"]["model"])
        weights = 4 * MIB if config.get("vmm", {}).get("enable_vmm_weights") else 0
        self.models = ScriptedModels(config["model"].get("model_id") or path.name, path, weights)
        context = zmq.Context()
        self.inbox, self.outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self.outbox.linger = 500  # ms: last words reach a living server, a dead one keeps nobody
        self.inbox.connect(f"ipc://{folder}/to_engine")
        self.outbox.connect(f"ipc://{folder}/from_engine")
        self.death_fd = death_fd
        self.running: dict[str, Running] = {}
        self.next_beat = 0.0

    def send(self, message: FromEngine) -> None:
        self.outbox.send(msgspec.msgpack.encode(message))

    def serve(self) -> None:
        while True:
            delay = min(
                (job.due - time.monotonic() for job in self.running.values() if not job.model.is_paused), default=0.1
            )
            self.inbox.poll(1000 * min(1, max(0, delay)))
            self.live_or_exit()
            if time.monotonic() >= self.next_beat:
                self.next_beat = time.monotonic() + 0.3
                self.send(Heartbeat())
            while self.inbox.poll(0):
                self.take(msgspec.msgpack.decode(self.inbox.recv(), type=ToEngine))
            self.step()

    def live_or_exit(self) -> None:
        if select.select([self.death_fd], [], [], 0)[0]:
            sys.exit(0)

    def take(self, message: ToEngine) -> None:
        match message:
            case Request():
                try:
                    self.running[message.request_id] = self.start(message)
                except RequestError as error:
                    info = ErrorInfo(error.message, error.status, error.code, retry_after=error.retry_after)
                    refused = Output(request_id=message.request_id, finish="error", error=info)
                    self.send(StepEvents(outputs=[refused]))
            case Abort(request_id=request_id):
                self.running.pop(request_id, None)
                self.send(StepEvents(outputs=[], snapshot=self.snapshot()))
            case Shutdown():
                sys.exit(0)
            case _:
                self.send(self.models.carry_out(message))

    def start(self, request: Request) -> Running:
        model = self.models.find(request.model)
        if model.state != "awake":
            raise RequestError("the model is asleep", status=503, code="model_sleeping", retry_after=1)
        text = model.tokenizer.decode(request.prompt_ids)
        start, end = text.find("{"), text.rfind("}")
        script = json.loads(text[start : end + 1]) if 0 <= start < end else {}
        say = script.get("say", text)
        tokens = say if isinstance(say, list) else model.tokenizer.encode(say, add_special_tokens=False)
        model.counters["prompt_tokens_computed"] += len(request.prompt_ids)
        return Running(request, model, script, tokens[: request.sampling.max_tokens])

    def step(self) -> None:
        now = time.monotonic()
        ready = [job for job in self.running.values() if job.due <= now and not job.model.is_paused]
        outputs = [output for job in ready if (output := self.advance(job)) is not None]
        if outputs:
            for model in {job.model.model_id: job.model for job in ready}.values():
                model.counters["steps"] += 1
            self.send(StepEvents(outputs=outputs, snapshot=self.snapshot()))

    def advance(self, job: Running) -> Output | None:
        script, request_id = job.script, job.request.request_id
        job.due = time.monotonic() + script.get("delay", 0)
        if job.done >= script.get("at", 1 << 30):
            return self.misbehave(job)
        if script.get("endless"):
            tokens, finish = job.model.tokenizer.encode("x") * script.get("per_step", 1), None
        else:
            tokens = job.tokens[job.done : job.done + script.get("per_step", 1)]
            finish = script.get("finish", "length") if job.done + len(tokens) >= len(job.tokens) else None
        job.done += len(tokens)
        job.model.counters["generation_tokens"] += len(tokens)
        if finish:
            del self.running[request_id]
        wants, prompt_wants = job.request.sampling.logprobs, job.request.sampling.prompt_logprobs
        prompt = job.request.prompt_ids[1:] if prompt_wants is not None and job.done == len(tokens) else []
        logprobs = None if wants is None else [TokenLogprob(t, -t / 100, ((t, -t / 100),) * wants) for t in tokens]
        return Output(
            request_id=request_id, token_ids=tokens, logprobs=logprobs, finish=finish, output_tokens=job.done,
            prompt_logprobs=[TokenLogprob(t, -t / 100, ((t, -t / 100),) * (prompt_wants or 0)) for t in prompt],
            prompt_tokens=len(job.request.prompt_ids), cached_tokens=len(job.request.prompt_ids) // 2,
        )  # fmt: skip

    def misbehave(self, job: Running) -> Output | None:
        script = job.script
        if "die" in script:
            if script["die"] == 75:
                self.send(Fatal("rank 1 was lost", 75))
                time.sleep(0.1)
            os._exit(script["die"])
        if "garble" in script:
            self.outbox.send(b"\xc1 no message")
        if "error" in script:
            del self.running[job.request.request_id]
            status, code = script["error"]
            error = ErrorInfo("what went wrong, with numbers", status, code, retry_after=7)
            return Output(request_id=job.request.request_id, finish="error", error=error)
        job.due = 1 << 62  # garble and mute: nothing more
        return None

    def snapshot(self) -> Snapshot:
        self.models.count_running(Counter(job.model.model_id for job in self.running.values()))
        return self.models.snapshot()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runtime_dir", type=Path, required=True)
    parser.add_argument("--death_fd", type=int, required=True)
    parser.add_argument("--load_until", type=Path, help="this file exists")
    parser.add_argument("--fatal", type=int, default=None)
    options = parser.parse_args()
    engine = ScriptedEngine(options.runtime_dir, options.death_fd)
    engine.send(Loading("weights", 0.25))
    while options.load_until is not None and not options.load_until.exists():
        engine.live_or_exit()
        time.sleep(0.01)
    if options.fatal is not None:
        engine.send(Fatal("the model needs 9 bytes and 8 are free", options.fatal))
        sys.exit(options.fatal)
    engine.send(engine.models.first.ready(engine.snapshot()))
    engine.serve()


if __name__ == "__main__":
    main()
