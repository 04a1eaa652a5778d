"""A plan in the making: what one step may do at most, what is in it so far, and what to put back if it cannot be had.

Owns numbers and rows. The scheduler decides what goes in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xllm_cli.core import Row
from xllm_cli.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of one step. `chunk` is the most prompt tokens of one sequence, `prefill` of all; None is no bound.

    `scored` bounds the tokens of prompts whose log probabilities are wanted: each needs a row of logits.
    """

    tokens: int
    sequences: int
    chunk: int | None
    prefill: int | None
    share_in_batch: bool = False
    scored: int = 256
    by_priority: bool = False


@dataclass(slots=True)
class Totals:
    """What has been scheduled since the start; they only grow."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_chunks: int = 0
    preemptions: int = 0
    exhausted_steps: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(slots=True)
class Entry:
    """A sequence in a plan, and what to put back if the plan cannot be executed."""

    sequence: Sequence
    row: Row
    computed_before: int
    admitted: bool


@dataclass(slots=True)
class Draft:
    """A plan being made. `short_blocks` are the most blocks that one sequence wanted and could not have."""

    step: int
    now: float
    tokens_left: int
    prefill_left: int
    scored_left: int = 0
    entries: list[Entry] = field(default_factory=list)
    short_blocks: int = 0

    @property
    def is_short(self) -> bool:
        return self.short_blocks > 0

    def miss(self, num_blocks: int) -> None:
        """Somebody goes without so many blocks: nobody younger gets any in this plan."""
        self.short_blocks = max(self.short_blocks, num_blocks, 1)
