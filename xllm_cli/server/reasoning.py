"""Reasoning between `<think>` and `</think>`, as Qwen3, DeepSeek-R1 and their kin write it, apart from the answer.

[blanks] <think> reasoning </think> [blanks] answer      the prompt may have opened the block already
"""

from __future__ import annotations

from xllm_cli.server.deltas import Delta, MessageParser, held_back

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser:
    """Splits a message in two; the second part is another parser's. Blanks around the tags belong to neither.

    start → (lead → reasoning → gap →) answer
    """

    def __init__(self, answer: MessageParser, *, is_open: bool) -> None:
        """`is_open`: the prompt ends within the block. A model may then open it once more all the same."""
        self._answer = answer
        self._is_open = is_open
        self._held = ""
        self._state = "start"

    def feed(self, text: str) -> list[Delta]:
        """See MessageParser."""
        self._held += text
        deltas: list[Delta] = []
        if self._state == "start":
            self._start()
        if self._state == "lead":
            self._skip_blanks("reasoning")
        if self._state == "reasoning":
            deltas += self._reason()
        if self._state == "gap":
            self._skip_blanks("answer")
        if self._state == "answer":
            deltas += self._answer.feed(self._take(len(self._held)))
        return deltas

    def flush(self) -> list[Delta]:
        """See MessageParser. A block that was never closed was all reasoning."""
        rest = self._take(len(self._held))
        if self._state == "reasoning" or (self._state == "start" and self._is_open):
            return self._reasoning(rest.strip())
        return [*self._answer.feed(rest), *self._answer.flush()]

    def _start(self) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._held, self._state = text.removeprefix(OPEN), "lead"
        elif not OPEN.startswith(text):
            self._state = "lead" if self._is_open else "answer"

    def _skip_blanks(self, next_state: str) -> None:
        self._held = self._held.lstrip()
        if self._held:
            self._state = next_state

    def _reason(self) -> list[Delta]:
        before, tag, after = self._held.partition(CLOSE)
        if tag:
            self._held, self._state = after, "gap"
            return self._reasoning(before.rstrip())
        safe = self._held[: len(self._held) - held_back(self._held, CLOSE)].rstrip()
        return self._reasoning(self._take(len(safe)))

    def _reasoning(self, text: str) -> list[Delta]:
        return [Delta(reasoning=text)] if text else []

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken
