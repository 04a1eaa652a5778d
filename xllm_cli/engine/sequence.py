"""One request's life inside the engine: its tokens, how far its KV is written, and its blocks.

Owned by the engine thread alone. Knows no pages, no device and no HTTP.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from xllm_cli.cache.blocks import BlockTable
from xllm_cli.core import (
    ErrorInfo,
    FinishReason,
    LogitChanges,
    Output,
    PromptScoring,
    Request,
    Row,
    RowSampling,
    TokenLogprob,
)
from xllm_cli.engine.grammar import Guide
from xllm_cli.errors import RequestError


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is the prompt and what was generated; positions `[0, computed)` have their KV written.

    A running sequence whose `computed == len(tokens) - 1` decodes; otherwise it prefills. After a preemption
    `computed` is 0 again and the generated tokens are prefilled like a prompt. The log probabilities of the prompt's
    first `scored` tokens, if asked for, have been told; the very first has none. `stuck_since` is when the token at
    `stuck_at` first failed, alone in its step, for want of memory to compute in; None once it ran.
    """

    number: int
    request: Request
    table: BlockTable
    max_tokens: int
    seed: int
    guide: Guide | None = None
    tokens: list[int] = field(init=False)
    computed: int = 0
    scored: int = 1
    cached_tokens: int = 0
    preempted_in_step: int = -1
    queued_at: float = 0.0
    admitted_at: float | None = None
    rank: int = 0
    stuck_since: float | None = None
    stuck_at: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: by rank, which is 0 for all where requests have no priorities, then by arrival."""
        return self.rank, self.number

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def most_positions(self) -> int:
        """Positions whose KV may ever be written: the last token's never is."""
        return self.num_prompt + max(self.max_tokens, 1) - 1

    @property
    def num_unscored(self) -> int:
        """Tokens of the prompt whose log probabilities are still to be told."""
        return self.num_prompt - self.scored if self.request.sampling.prompt_logprobs is not None else 0

    @property
    def is_ready(self) -> bool:
        """Its grammar, if it has one, knows what may come next."""
        return self.guide is None or self.guide.mask is not None

    @property
    def is_decoding(self) -> bool:
        """Only the newest token's KV is missing."""
        return self.num_generated > 0 and self.computed == len(self.tokens) - 1

    def row(self, count: int) -> Row:
        """The next `count` tokens to run; draws a token when they reach the end of what is known."""
        end = self.computed + count
        return Row(
            sequence=self.number,
            token_ids=self.tokens[self.computed : end],
            start=self.computed,
            blocks=list(self.table.blocks),
            sampling=self._sampling() if end == len(self.tokens) and self.max_tokens else None,
            scoring=self._scoring(end) if self.num_unscored else None,
        )

    def _scoring(self, end: int) -> PromptScoring | None:
        """The tokens of the prompt predicted before position `end` and not told yet."""
        targets = self.tokens[self.scored : min(end + 1, self.num_prompt)]
        if not targets:
            return None  # a recomputation that has not come so far
        return PromptScoring(self.scored - 1 - self.computed, targets, self.request.sampling.prompt_logprobs or 0)

    def ran(self, count: int) -> None:
        """The KV of the next `count` tokens is written."""
        self.computed += count
        if self.stuck_since is not None and self.computed > self.stuck_at:
            self.stuck_since = None

    def stuck(self, position: int, now: float) -> None:
        """The token at `position` did not run though nothing else did."""
        if self.stuck_since is None or position > self.stuck_at:
            self.stuck_since, self.stuck_at = now, position

    def admitted(self) -> None:
        """It runs from here on."""
        if self.admitted_at is None:
            self.admitted_at = time.monotonic()

    def hit(self, tokens: int) -> None:
        """So many were taken from the prefix cache. After a preemption they may be its own: it had paid for them."""
        if self.preempted_in_step < 0:
            self.cached_tokens += tokens

    def _sampling(self) -> RowSampling:
        wanted = self.request.sampling
        return RowSampling(
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            min_p=wanted.min_p,
            seed=self.seed,
            choice=self.request.choice,
            position=self.num_generated,
            logprobs=wanted.logprobs,
            forbidden=self._forbidden(),
            changes=self._changes(),
        )

    def _forbidden(self) -> tuple[int, ...]:
        wanted = self.request.sampling
        is_held_back = self.num_generated < wanted.min_tokens
        ends = self.guide.end_ids if self.guide is not None and (is_held_back or wanted.ignore_eos) else ()
        return (*wanted.stop_token_ids, *ends) if is_held_back else ends

    def _changes(self) -> LogitChanges | None:
        """What the tokens so far do to the next logits; None, the usual case, costs nothing."""
        wanted = self.request.sampling
        penalties = (wanted.presence_penalty, wanted.frequency_penalty, wanted.repetition_penalty)
        is_penalised = penalties != (0.0, 0.0, 1.0)
        if not is_penalised and not wanted.logit_bias and self.guide is None:
            return None
        return LogitChanges(
            history=list(self.tokens) if is_penalised else [],
            num_prompt=self.num_prompt,
            presence=wanted.presence_penalty,
            frequency=wanted.frequency_penalty,
            repetition=wanted.repetition_penalty,
            bias=wanted.logit_bias,
            allowed=None if self.guide is None else self.guide.mask,
        )

    def score(self, scores: list[TokenLogprob]) -> FinishReason | None:
        """Take the prompt's next log probabilities; the reason if nothing else was asked for."""
        self.scored += len(scores)
        return None if self.max_tokens or self.computed < self.num_prompt else "length"

    def append(self, token_id: int) -> FinishReason | None:
        """Take the next token; the reason if the sequence ends with it."""
        self.tokens.append(token_id)
        sampling = self.request.sampling
        if token_id in sampling.stop_token_ids and self.num_generated > sampling.min_tokens:
            return "stop"
        if self.num_generated >= self.max_tokens:
            return "length"
        if self.guide is not None:
            self.guide.advance(token_id)
        return None

    def failure(self, message: str, code: str) -> Output:
        """The last output of a sequence that cannot go on."""
        return Output(request_id=self.request.request_id, finish="error", error=ErrorInfo(message, 500, code))

    def output(
        self,
        tokens: list[TokenLogprob],
        finish: FinishReason | None = None,
        scores: list[TokenLogprob] | None = None,
    ) -> Output:
        """What the client hears of this step."""
        is_first = self.num_generated == len(tokens) and (self.num_generated > 0 or finish is not None)
        return Output(
            request_id=self.request.request_id,
            token_ids=[t.token_id for t in tokens],
            logprobs=tokens if self.request.sampling.logprobs is not None else None,
            prompt_logprobs=scores or [],
            finish=finish,
            prompt_tokens=self.num_prompt,
            cached_tokens=self.cached_tokens,
            output_tokens=self.num_generated,
            prefill_seconds=time.monotonic() - self.admitted_at if is_first and self.admitted_at else None,
        )


def error_info(error: RequestError) -> ErrorInfo:
    """An error as it crosses to the server."""
    return ErrorInfo(error.message, error.status, error.code, error.param, error.retry_after)


def refusal(request_id: str, error: RequestError) -> Output:
    """A request's last output when it ends with an error."""
    return Output(request_id=request_id, finish="error", error=error_info(error))
