"""The engine as a library: the same loop as the server's, in this process, without HTTP.

with LLM("/models/smollm2", enable_vmm_kvcache=True, vmm_elastic=True) as llm:
    print(llm.generate(["The capital of France is"], SamplingParams(max_tokens=8))[0].text)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from xllm_cli.config import make_config
from xllm_cli.core import ErrorInfo, FinishReason, Output, Request, SamplingParams, Snapshot, TokenLogprob
from xllm_cli.engine.engine import Engine
from xllm_cli.engine.host import build_engine
from xllm_cli.server.tokenizer import Tokenizer
from xllm_cli.vmm.driver import Driver

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """What became of one prompt. `error` is set when `finish_reason` is "error"; `text` has no stop token."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    error: ErrorInfo | None = None
    text: str = ""

    def take(self, output: Output) -> None:
        """Append what one step did."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.finish_reason, self.error = output.finish, output.error


class LLM:
    """A model served in-process. `flags` are those of `xllm serve`, as keyword arguments; ConfigError if they clash."""

    def __init__(self, model: str | Path, *, driver: Driver | None = None, **flags: Any) -> None:
        """`driver` replaces the device's own."""
        config = make_config(model=str(model), **flags)
        self._engine, self._ready = build_engine(config, lambda phase: None, driver)
        self._tokenizer = Tokenizer.from_folder(Path(model))
        self._served = 0

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Run all prompts (texts or token ids) to their end, batched together; answers in the order of the prompts."""
        shared = sampling if isinstance(sampling, SamplingParams) else SamplingParams()
        each = list(sampling) if isinstance(sampling, Sequence) else [shared] * len(prompts)
        answers: dict[str, Completion] = {}
        for prompt, params in zip(prompts, each, strict=True):
            self._served += 1
            request_id = f"llm-{self._served}"
            ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            answers[request_id] = Completion(ids)
            refused = self._engine.submit(
                Request(request_id=request_id, prompt_ids=ids, sampling=self._with_end_tokens(params))
            )
            if refused is not None:
                answers[request_id].take(refused)
        self._run(answers)
        for answer in answers.values():
            answer.text = self._text(answer)
        return list(answers.values())

    def _run(self, answers: dict[str, Completion]) -> None:
        while self._engine.has_work:
            for output in self._engine.step().outputs:
                answers[output.request_id].take(output)
            self._engine.rest()

    def _with_end_tokens(self, params: SamplingParams) -> SamplingParams:
        if params.ignore_eos:
            return params
        ends = {*params.stop_token_ids, *self._ready.eos_token_ids}
        return msgspec.structs.replace(params, stop_token_ids=tuple(sorted(ends)))

    def _text(self, answer: Completion) -> str:
        ids = answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids
        return self._tokenizer.decode(ids)

    def idle(self) -> None:
        """One step without requests: gives back what is due (spares, pages nobody wants)."""
        self._engine.step()

    def memory(self) -> dict[str, Any]:
        """What GET /vmm answers, as of now."""
        report: dict[str, Any] = msgspec.to_builtins(self.snapshot.memory)
        return report

    @property
    def snapshot(self) -> Snapshot:
        """Memory and counters as of now."""
        return self._engine.snapshot()

    @property
    def engine(self) -> Engine:
        """The engine itself, for callers that submit, abort and step on their own."""
        return self._engine

    def close(self) -> bool:
        """Give everything back; False if a page or a view leaked."""
        return self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
