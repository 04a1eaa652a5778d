"""The engine as a library: the same loop as the server's, in this process, without HTTP.

with LLM("/models/smollm2", enable_vmm_kvcache=True, vmm_elastic=True) as llm:
    print(llm.generate(["The capital of France is"], SamplingParams(max_tokens=8))[0].text)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from xllm_cli.config import make_config
from xllm_cli.core import ErrorInfo, FinishReason, Output, Request, SamplingParams, Snapshot, TokenLogprob
from xllm_cli.engine.engine import Engine
from xllm_cli.engine.host import Host
from xllm_cli.engine.start import build_first
from xllm_cli.server.tokenizer import Tokenizer
from xllm_cli.vmm.driver import Driver

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """What became of one prompt. `error` is set when `finish_reason` is "error"; `text` has no stop token."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    error: ErrorInfo | None = None
    text: str = ""

    def take(self, output: Output) -> None:
        """Append what one step did."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs += output.prompt_logprobs
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.finish_reason, self.error = output.finish, output.error


class LLM:
    """A model served in-process. `flags` are those of `xllm serve`, as keyword arguments; ConfigError if they clash."""

    def __init__(self, model: str | Path, *, driver: Driver | None = None, **flags: Any) -> None:
        """`driver` replaces the device's own."""
        config = make_config(model=str(model), **flags)
        self._tokenizer = Tokenizer.from_folder(Path(model))  # first: should it fail, nothing else is open
        self._host = Host(*build_first(config, lambda phase: None, driver))
        self._ready = self._host.ready
        self._engine = self._host.engine("")
        self._served = 0

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        model: str = "",
    ) -> list[Completion]:
        """Run all prompts (texts or token ids) to their end, batched together; answers in the order of the prompts.
        `model` is one that was forked; texts are read and written with the first's tokenizer."""
        shared = sampling if isinstance(sampling, SamplingParams) else SamplingParams()
        each = list(sampling) if isinstance(sampling, Sequence) else [shared] * len(prompts)
        requests = [self._request(prompt, params, model) for prompt, params in zip(prompts, each, strict=True)]
        answers = {request.request_id: Completion(request.prompt_ids) for request in requests}
        try:
            self._run(requests, answers)
        finally:  # an interrupt or an error in a step: nothing of this call goes on behind the next one's back
            for request_id in answers:
                self._host.abort(request_id)
        for request, answer in zip(requests, answers.values(), strict=True):
            answer.text = self._text(answer, request.sampling.stop_token_ids)
        return list(answers.values())

    def _request(self, prompt: Prompt, params: SamplingParams, model: str) -> Request:
        self._served += 1
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        sampling = self._with_end_tokens(params)
        return Request(request_id=f"llm-{self._served}", prompt_ids=ids, sampling=sampling, model=model)

    def _run(self, requests: Sequence[Request], answers: Mapping[str, Completion]) -> None:
        """Step until all have ended. Outputs of what the caller submitted to the engine itself are not ours to keep."""
        refused = [self._host.submit(request) for request in requests]
        outputs = [output for output in refused if output is not None]
        num_open = len(requests)
        while True:
            for output in outputs:
                if output.request_id in answers:
                    answers[output.request_id].take(output)
                    num_open -= output.finish is not None
            if not num_open:
                return
            outputs = self._host.step().outputs
            self._host.rest()

    def _with_end_tokens(self, params: SamplingParams) -> SamplingParams:
        if params.ignore_eos:
            return params
        ends = {*params.stop_token_ids, *self._ready.eos_token_ids}
        return msgspec.structs.replace(params, stop_token_ids=tuple(sorted(ends)))

    def _text(self, answer: Completion, ends: Sequence[int]) -> str:
        ids = answer.token_ids
        if answer.finish_reason == "stop" and ids[-1] in ends:  # else a grammar ended it
            ids = ids[:-1]
        return self._tokenizer.decode(ids)

    def idle(self) -> None:
        """One step without requests: looks at memory and gives back what is due (spares, pages nobody wants)."""
        self._host.step()

    def memory(self) -> dict[str, Any]:
        """What GET /vmm answers, as of now."""
        report: dict[str, Any] = msgspec.to_builtins(self.snapshot.memory)
        return report

    @property
    def snapshot(self) -> Snapshot:
        """Memory and counters as of now."""
        return self._host.snapshot()

    @property
    def host(self) -> Host:
        """Its models, of which there is one until others are forked."""
        return self._host

    @property
    def engine(self) -> Engine:
        """The first model's engine, for callers that submit, abort and step on their own."""
        return self._engine

    def close(self) -> bool:
        """Give everything back; False if a page or a view leaked."""
        return self._host.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
