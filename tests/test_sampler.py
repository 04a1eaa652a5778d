"""The sampler against its definition: Philox's known answers, distributions, and rows that do not see each other."""

from __future__ import annotations

import numpy as np
import pytest

from xllm_cli.core import RowSampling
from xllm_cli.worker.sampler import philox, sample, uniform

VOCABULARY = 320


def logits_of(seed: int, rows: int = 1, vocabulary: int = VOCABULARY) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, vocabulary)).astype(np.float32) * 3


def draws(logits: np.ndarray, count: int, **wanted: float) -> np.ndarray:
    rows = [RowSampling(temperature=1.0, seed=7, position=i, **wanted) for i in range(count)]
    return np.array([token.token_id for token in sample(np.repeat(logits, count, axis=0), rows)])


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, 2**128 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            0x0370734413198A2E85A308D3243F6A88,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(key, counter, words):
    assert philox(key, counter) == words


def test_uniform_depends_on_every_argument():
    numbers = {uniform(s, c, p) for s in range(10) for c in range(10) for p in range(10)}
    assert len(numbers) == 1000
    assert all(0 <= x < 1 for x in numbers)
    assert abs(np.mean(list(numbers)) - 0.5) < 0.05


def test_greedy_takes_the_first_maximum():
    logits = np.zeros((1, 8), np.float32)
    logits[0, [3, 5]] = 2
    assert sample(logits, [RowSampling()])[0].token_id == 3


def test_draws_follow_the_distribution():
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    share = np.bincount(draws(logits, 8000), minlength=4) / 8000
    assert np.abs(share - [0.5, 0.25, 0.125, 0.125]).max() < 0.02


def test_temperature_flattens():
    logits = np.log(np.array([[0.8, 0.2]], np.float32))
    rows = [RowSampling(temperature=2.0, seed=1, position=i) for i in range(8000)]
    share = np.mean([t.token_id for t in sample(np.repeat(logits, 8000, axis=0), rows)])
    assert abs(share - 1 / 3) < 0.02  # sqrt(0.2) / (sqrt(0.8) + sqrt(0.2))


def test_top_k_keeps_the_k_likeliest():
    logits = logits_of(0)
    best = set(np.argsort(-logits[0])[:5].tolist())
    assert set(draws(logits, 2000, top_k=5).tolist()) == best


def test_top_k_ties_keep_the_lowest_ids():
    logits = np.ones((1, 10), np.float32)
    assert set(draws(logits, 400, top_k=3).tolist()) == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    assert set(draws(logits, 2000, top_p=0.69).tolist()) == {0, 1}
    assert set(draws(logits, 2000, top_p=0.71).tolist()) == {0, 1, 2}


def test_a_row_does_not_see_its_neighbours():
    logits = logits_of(1, rows=17)
    rows = [RowSampling(temperature=0.7, top_p=0.9, top_k=50, seed=i, position=3, logprobs=4) for i in range(17)]
    together = sample(logits.copy(), rows)
    alone = [sample(logits[i : i + 1].copy(), rows[i : i + 1])[0] for i in range(17)]
    assert list(together) == alone


def test_forbidden_tokens_are_never_drawn_but_keep_their_logprobs():
    logits = logits_of(2)
    best = int(logits.argmax())
    answer = sample(logits, [RowSampling(forbidden=(best,), logprobs=1)])[0]
    assert answer.token_id != best
    assert answer.top[0][0] == best


def test_logprobs_are_those_of_the_raw_logits():
    logits = logits_of(3)
    answer = sample(logits, [RowSampling(temperature=0.1, logprobs=3)])[0]
    expected = logits[0].astype(np.float64) - np.log(np.exp(logits[0].astype(np.float64)).sum())
    assert answer.logprob == pytest.approx(expected[answer.token_id], abs=1e-6)
    assert [i for i, _ in answer.top] == np.argsort(-logits[0])[:3].tolist()
    assert sum(np.exp(lp) for _, lp in sample(logits, [RowSampling(logprobs=VOCABULARY)])[0].top) == pytest.approx(1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidding_ids_that_do_not_exist_forbids_nothing(temperature: float):
    logits = logits_of(5)
    free = RowSampling(temperature=temperature, seed=3)
    odd = RowSampling(temperature=temperature, seed=3, forbidden=(VOCABULARY, 2**31 - 1, -1))
    assert sample(logits, [odd]) == sample(logits, [free])


@pytest.mark.parametrize("wanted", [{}, {"top_k": 3}, {"top_p": 0.999}])
def test_min_p_drops_what_is_much_less_likely_than_the_likeliest(wanted: dict[str, float]):
    logits = np.log(np.array([[0.5, 0.3, 0.12, 0.08]], np.float32))
    assert set(draws(logits, 2000, min_p=0.25, **wanted).tolist()) == {0, 1}
    assert set(draws(logits, 2000, min_p=0.2, **wanted).tolist()) == {0, 1, 2}
    assert set(draws(logits, 400, min_p=1.0, **wanted).tolist()) == {0}


def test_min_p_counts_after_the_temperature():
    logits = np.log(np.array([[0.8, 0.2]], np.float32))
    rows = [RowSampling(temperature=2.0, seed=1, position=i, min_p=0.4) for i in range(200)]
    assert {t.token_id for t in sample(np.repeat(logits, 200, axis=0), rows)} == {0, 1}  # sqrt(0.25) is above 0.4


@pytest.mark.parametrize("wanted", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5, "logprobs": 3}])
def test_logits_that_are_no_numbers_draw_nothing(wanted: dict):
    logits = logits_of(5, rows=4)
    logits[0, 7] = np.nan
    logits[1] = np.nan
    logits[2] = -np.inf
    tokens = sample(logits, [RowSampling(seed=3, **wanted)] * 4)
    assert [token.token_id < 0 for token in tokens] == [True, True, True, False]
