"""One choice's tokens turned into its text: UTF-8 safe, stop strings found and held back. Knows nothing of HTTP.

Used for streamed and whole answers alike, so the join of the pieces is the whole text by construction. What comes out
depends on the tokens only, never on how they were cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xllm_cli.core import FinishReason, TokenLogprob
from xllm_cli.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a choice's text is cut. `stop_token_ids` end it without showing; stop strings count from `min_tokens` on.

    With `echo` the text begins with the prompt's, in which no stop is looked for.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    echo: bool = False


class LogprobEntry(NamedTuple):
    """A token's log probabilities and where its text begins, in characters of the choice's text. The first token of a
    prompt has none: it is not `known`."""

    logprob: TokenLogprob
    offset: int
    known: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain: text, the entries whose text it holds, and the end if this is the last; `stop` is the stop
    string that ended it."""

    text: str
    entries: list[LogprobEntry] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | None = None


class StopFinder:
    """Finds the stop string that completes first, reading character by character; between two that complete
    together, the longer. Only the longest suffix that may still become a stop is held back."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> tuple[str, bool]:
        """The text released, and whether a stop was found, which is `found` then (nothing may follow)."""
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            end, start = min(matches)
            self.found = text[start:end]
            self._held = ""
            return text[: end if self._include else start], True
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _partial(self, text: str) -> int:
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


class TextStream:
    """The text of one choice, fed step by step."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions, prompt_ids: Sequence[int] = ()) -> None:
        self._options = options
        self._prompt = list(prompt_ids) if options.echo else []
        self._num_echoed = 0
        self._decoder = tokenizer.stream(options.skip_special_tokens)
        self._finder = StopFinder(options.stop, options.include_stop)
        self._pending: list[LogprobEntry] = []
        self._num_decoded = 0
        self._num_released = 0
        self.num_tokens = 0

    def feed(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None = None,
        finish: FinishReason | None = None,
        *,
        prompt_logprobs: Sequence[TokenLogprob] = (),
    ) -> Piece:
        """Take a step's tokens. A returned `finish` ends the choice, also when the engine has not ended it."""
        is_scored = bool(token_ids) or finish is not None
        released = self._echo(prompt_logprobs, everything=is_scored, with_entries=logprobs is not None)
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if logprobs is not None:
                self._pending.append(LogprobEntry(logprobs[index], self._num_decoded))
            text, found = self._release(self._decode(token_id, finish == "stop" and index == len(token_ids) - 1))
            released += text
            if found:
                return self._stopped(released)
        if finish is not None:
            text, found = self._release(self._decoder.flush())
            released += text
            if found:
                return self._stopped(released)
            released += self._finder.flush()
        self._num_released += len(released)
        return Piece(released, self._take_entries(everything=finish is not None), finish)

    def _echo(self, logprobs: Sequence[TokenLogprob], *, everything: bool, with_entries: bool) -> str:
        """The text of the prompt's tokens as far as they are scored, or of all that are left."""
        count = len(self._prompt)
        if not everything:
            count = min(count, len(logprobs) + (self._num_echoed == 0) if logprobs else 0)
        scores = iter(logprobs)
        text = ""
        for token_id in self._prompt[:count]:
            if with_entries:
                known = self._num_echoed > 0
                self._pending.append(
                    LogprobEntry(next(scores) if known else TokenLogprob(token_id, 0.0), self._num_decoded, known)
                )
            shown = self._decoder.feed(token_id)
            self._num_decoded += len(shown)
            self._num_echoed += 1
            text += shown
        del self._prompt[:count]
        return text

    def _decode(self, token_id: int, is_end: bool) -> str:
        if is_end and token_id in self._options.stop_token_ids and not self._options.include_stop:
            return ""
        return self._decoder.feed(token_id)

    def _release(self, text: str) -> tuple[str, bool]:
        self._num_decoded += len(text)
        if self.num_tokens < self._options.min_tokens:
            return text, False
        return self._finder.feed(text)

    def _stopped(self, released: str) -> Piece:
        self._num_released += len(released)
        return Piece(released, self._take_entries(everything=False), "stop", self._finder.found)

    def _take_entries(self, *, everything: bool) -> list[LogprobEntry]:
        """Entries whose text has begun to be released; at an end without a stop string, all."""
        count = len(self._pending)
        if not everything:
            count = next((i for i, entry in enumerate(self._pending) if entry.offset >= self._num_released), count)
        taken, self._pending = self._pending[:count], self._pending[count:]
        return taken
