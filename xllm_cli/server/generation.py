"""The open choices of one HTTP request: engine outputs in, pieces of text out. Knows nothing of HTTP or JSON shapes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import NamedTuple

from xllm_cli.core import FinishReason, Output, Request
from xllm_cli.errors import RequestError
from xllm_cli.server.detokenizer import LogprobEntry, Piece, TextOptions, TextStream
from xllm_cli.server.engine_client import EngineClient
from xllm_cli.server.instruments import Timeline
from xllm_cli.server.served import Served


class Usage(NamedTuple):
    """Tokens of a whole HTTP request; each prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Choice:
    """One sequence: its place in the answer and what is known of it so far."""

    index: int
    request: Request
    text: TextStream
    timeline: Timeline
    cached_tokens: int = 0
    finish: FinishReason | None = None


@dataclass(slots=True)
class WholeChoice:
    """A choice that has ended."""

    index: int
    text: str = ""
    entries: list[LogprobEntry] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | None = None


class Generation:
    """Runs requests to their end. `close` aborts what is still open; it may be called at any time, more than once."""

    def __init__(
        self, client: EngineClient, served: Served, requests: list[Request], options: TextOptions, *, arrived: float
    ) -> None:
        self._client = client
        self._choices = {
            request.request_id: Choice(
                index,
                request,
                TextStream(served.tokenizer, options, request.prompt_ids),
                Timeline(served.model.instruments, request, arrived),
            )
            for index, request in enumerate(requests)
        }
        self._queue = client.submit(requests)

    def close(self) -> None:
        """Abort every choice that has not ended."""
        self._client.abort(self._choices)
        for choice in self._choices.values():
            self._end(choice, "abort")

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """`(choice index, piece)` as the engine produces them. RequestError when one choice fails: then all end."""
        num_open = len(self._choices)
        while num_open:
            output = await self._queue.get()
            choice = self._choices[output.request_id]
            if choice.finish is not None:
                continue  # came before the engine read our abort
            piece = self._take(choice, output)
            if piece.finish is not None:
                self._end(choice, piece.finish)
                num_open -= 1
                self._client.abort([output.request_id])  # a stop string ends it here, not there
            if piece.text or piece.entries or piece.finish:
                yield choice.index, piece

    async def whole(self) -> list[WholeChoice]:
        """All choices, ended, in order."""
        choices = [WholeChoice(choice.index) for choice in self._choices.values()]
        async for index, piece in self.pieces():
            choices[index].text += piece.text
            choices[index].entries += piece.entries
            choices[index].finish = piece.finish
            choices[index].stop = piece.stop
        return choices

    def usage(self) -> Usage:
        """Tokens so far."""
        first = [choice for choice in self._choices.values() if choice.request.choice == 0]
        return Usage(
            prompt_tokens=sum(len(choice.request.prompt_ids) for choice in first),
            completion_tokens=sum(choice.text.num_tokens for choice in self._choices.values()),
            cached_tokens=sum(choice.cached_tokens for choice in first),
        )

    def _end(self, choice: Choice, reason: FinishReason) -> None:
        if choice.finish is None:
            choice.finish = reason
            choice.timeline.ended(reason, choice.text.num_tokens)

    def _take(self, choice: Choice, output: Output) -> Piece:
        choice.timeline.heard(len(output.token_ids), output.prefill_seconds)
        if output.error is not None or output.finish in ("abort", "error"):
            self._end(choice, "error")
        if output.error is not None:
            info = output.error
            raise RequestError(
                info.message, status=info.status, code=info.code, param=info.param, retry_after=info.retry_after
            )
        if output.finish in ("abort", "error"):
            raise RequestError("the engine gave this request up", status=500, code="aborted")
        choice.cached_tokens = max(choice.cached_tokens, output.cached_tokens)
        return choice.text.feed(
            output.token_ids, output.logprobs, output.finish, prompt_logprobs=output.prompt_logprobs
        )
