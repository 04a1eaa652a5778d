"""Answers of two devices compared by the rule: equal tokens, or a near tie of which the other took the second."""

from __future__ import annotations

from collections.abc import Sequence

from xllm_cli.core import SamplingParams
from xllm_cli.llm import Completion

NEAR = 1e-3  # of logits in float32: more than rounding ever moved one
NUM_TOKENS = 40
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)


def prompts_of(count: int, shortest: int = 100, step: int = 20) -> list[list[int]]:
    """Prompts that differ from each other from the first token on."""
    return [[(7 * i + j * (i + 3)) % 250 for j in range(shortest + step * i)] for i in range(count)]


def gaps(answer: Completion) -> list[float]:
    """The distance between the best two logits at every step."""
    return [step.top[0][1] - step.top[1][1] for step in answer.logprobs]


def assert_alike(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Every answer of `found` is what `expected` says, but for one near tie in a thousand tokens."""
    ends = 0
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.error is None, ours.error
        pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
        at = next((step for step, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            continue
        ends += 1
        said = f"prompt {index}, step {at}: {ours.token_ids[at]} for {theirs.token_ids[at]}, gap {gaps(theirs)[at]}"
        assert gaps(theirs)[at] < NEAR and theirs.logprobs[at].top[1][0] == ours.token_ids[at], said
    assert ends <= 1 + sum(len(answer.token_ids) for answer in expected) // 1000
