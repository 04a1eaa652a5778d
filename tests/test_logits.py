"""Changes to logits against their definitions, written out token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xllm_cli.core import LogitChanges, RowSampling
from xllm_cli.worker.logits import changed
from xllm_cli.worker.sampler import sample

VOCABULARY = 40
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)
AMOUNT = st.floats(-2, 2, width=32)


def logits_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=VOCABULARY).astype(np.float32) * 3


def expected(logits: np.ndarray, changes: LogitChanges) -> list[float]:
    """The same in plain Python: every token of the vocabulary on its own."""
    output = changes.history[changes.num_prompt :]
    answer = []
    for token, value in enumerate(logits.tolist()):
        if token in changes.history:
            value = value / changes.repetition if value > 0 else value * changes.repetition
        value -= changes.frequency * output.count(token) + changes.presence * (token in output)
        answer.append(value + sum(amount for one, amount in changes.bias if one == token))
    return answer


BIAS = st.lists(
    st.tuples(st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32)),
    max_size=4,
    unique_by=lambda pair: pair[0],
)
CHANGES = st.builds(
    lambda prompt, output, **amounts: LogitChanges(history=prompt + output, num_prompt=len(prompt), **amounts),
    TOKENS,
    TOKENS,
    presence=AMOUNT,
    frequency=AMOUNT,
    repetition=st.floats(0.5, 2),
    bias=BIAS.map(tuple),
)


@given(st.integers(0, 99), CHANGES)
def test_every_token_gets_what_the_formulas_say(seed: int, changes: LogitChanges):
    logits = logits_of(seed)
    np.testing.assert_allclose(changed(logits, changes, ()), expected(logits, changes), rtol=1e-5, atol=1e-4)
    assert np.array_equal(logits, logits_of(seed)), "the raw logits stay for the logprobs"


def test_the_prompt_counts_for_repetition_only():
    logits = np.ones(4, np.float32)
    strict = LogitChanges(history=[1, 1, 2], num_prompt=2, presence=1.0, frequency=0.5, repetition=2.0)
    assert changed(logits, strict, ()).tolist() == [1.0, 0.5, -1.0, 1.0]


def test_penalties_change_what_greedy_takes():
    logits = np.array([[1.0, 3.0, 2.0]], np.float32)
    once = LogitChanges(history=[0, 1], num_prompt=1, presence=1.5)
    assert sample(logits, [RowSampling(changes=once, logprobs=1)])[0].token_id == 2


@pytest.mark.parametrize(("token", "amount", "taken"), [(0, 5.0, 0), (1, -100.0, 2), (9, 100.0, 1)])
def test_bias_moves_the_choice_and_not_the_logprobs(token: int, amount: float, taken: int):
    logits = np.array([[1.0, 3.0, 2.0]], np.float32)
    biased = RowSampling(changes=LogitChanges(bias=((token, amount),)), logprobs=1)
    answer = sample(logits, [biased])[0]
    assert (answer.token_id, answer.top[0][0]) == (taken, 1)


def test_forbidden_wins_over_bias():
    logits = np.zeros(3, np.float32)
    assert changed(logits, LogitChanges(bias=((1, 100.0),)), [1, 7])[1] == -np.inf


def test_a_grammar_allows_what_it_has_a_bit_for():
    logits = np.arange(12, dtype=np.float32)
    some = changed(logits, LogitChanges(allowed=bytes([0b00010010, 0b00000100])), ())
    assert np.flatnonzero(np.isfinite(some)).tolist() == [1, 4, 10]
    short = changed(logits, LogitChanges(allowed=bytes([1])), ())
    assert np.flatnonzero(np.isfinite(short)).tolist() == [0]


def test_what_is_forbidden_yields_when_a_grammar_allows_nothing_else():
    logits, mask = np.zeros(8, np.float32), bytes([0b00000110])
    assert np.flatnonzero(np.isfinite(changed(logits, LogitChanges(allowed=mask), [1, 9]))).tolist() == [2]
    assert np.flatnonzero(np.isfinite(changed(logits, LogitChanges(allowed=mask), [1, 2]))).tolist() == [1, 2]
