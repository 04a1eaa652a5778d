"""How much one step may try after steps that ran out of execution memory: half as much, and slowly more again.

Owns one number of tokens and when a step that failed with a single token may be tried again. Knows no sequences.
"""

from __future__ import annotations

from xllm_cli.cache.account import GrowthGate

RECOVERY_STEPS = 32  # steps that must go well before twice as much is tried: a failing step costs a whole step


class Pace:
    """`tokens` bounds a step; `most` is what it is when nothing has failed.

    `shortage` is what the device said to the last step that failed; "" once a step has run since.
    """

    def __init__(self, most: int) -> None:
        self.tokens = most
        self.shortage = ""
        self._most = most
        self._good_steps = 0
        self._gate = GrowthGate()

    def failed(self, num_tokens: int, shortage: str, now: float) -> None:
        """A step of so many tokens did not fit. After one of a single token there is a pause, longer each time."""
        self.tokens = max(1, min(self.tokens, num_tokens) // 2)
        self.shortage = shortage
        self._good_steps = 0
        if num_tokens <= 1:
            self._gate.failed(now)

    def succeeded(self) -> None:
        """A step with rows ran."""
        self.shortage = ""
        self._gate.succeeded()
        if self.tokens < self._most:
            self._good_steps += 1
            if self._good_steps == RECOVERY_STEPS:
                self.tokens = min(self._most, 2 * self.tokens)
                self._good_steps = 0

    def is_resting(self, now: float) -> bool:
        """A single token did not fit a moment ago: nobody is admitted yet."""
        return self._gate.is_closed(now)
