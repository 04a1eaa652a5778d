"""From logits to tokens, one row at a time, so that a row's token never depends on the rows beside it.

Greedy is the first maximum. Otherwise temperature, min-p, top-k and top-p narrow the distribution, in this order, and
one uniform number picks by inverse distribution function; it comes from Philox4x32-10 keyed by (seed, choice,
position), so there is no generator state to lose in a preemption. Reported logprobs are those of the raw logits,
before penalties, bias and masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from xllm_cli.core import PromptScoring, RowSampling, TokenLogprob
from xllm_cli.worker.logits import changed

NO_TOKEN = TokenLogprob(-1, 0.0)
_MASK = 0xFFFFFFFF
_FLOAT_ROW = npt.NDArray[np.float32]


def philox(key: int, counter: int) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al. 2011): 64-bit key, 128-bit counter → four 32-bit words."""
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    c0, c1, c2, c3 = (counter >> shift & _MASK for shift in (0, 32, 64, 96))
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same three arguments everywhere."""
    high, low, _, _ = philox(seed & (1 << 64) - 1, position | choice << 64)
    return ((high << 32 | low) >> 11) * 2.0**-53


def sample(logits: _FLOAT_ROW, rows: Sequence[RowSampling]) -> tuple[TokenLogprob, ...]:
    """One token per row, NO_TOKEN where the logits hold a NaN or nothing that may be drawn.

    logits: [len(rows), vocabulary] float32, not changed.
    """
    return tuple(_sample_row(line, row) for line, row in zip(logits, rows, strict=True))


def score(logits: _FLOAT_ROW, wanted: Sequence[PromptScoring]) -> tuple[list[TokenLogprob], ...]:
    """The log probabilities of prompts' tokens. logits: [targets of all in order, vocabulary] float32."""
    lines = iter(logits)
    return tuple([_with_logprobs(next(lines), target, each.top) for target in each.targets] for each in wanted)


def _sample_row(logits: _FLOAT_ROW, row: RowSampling) -> TokenLogprob:
    raw = logits
    if row.forbidden or row.changes is not None:
        logits = changed(logits, row.changes, row.forbidden)
    token = int(logits.argmax())  # to numpy a NaN is the largest
    if not np.isfinite(logits[token]):
        return NO_TOKEN
    if row.temperature != 0 and row.top_k != 1:
        token = _draw(logits, row)
    if row.logprobs is None:
        return TokenLogprob(token, 0.0)
    return _with_logprobs(raw, token, row.logprobs)


def _draw(logits: _FLOAT_ROW, row: RowSampling) -> int:
    candidates, weights = _candidates(logits, row)
    cumulative = np.cumsum(weights)
    target = uniform(row.seed, row.choice, row.position) * cumulative[-1]
    # side="right": an entry of weight zero is never chosen, whatever the number
    index = int(np.searchsorted(cumulative, target, side="right"))
    return int(candidates[min(index, len(candidates) - 1)])


def _candidates(logits: _FLOAT_ROW, row: RowSampling) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """The tokens that may be drawn, likeliest first where an order is needed, and their unnormalised weights."""
    whole = len(logits)
    count = min(row.top_k, whole) if row.top_k > 0 else whole
    if count == whole and row.top_p >= 1:
        weights = _weights(logits, row.temperature)
        return np.arange(whole), np.where(weights < row.min_p, 0.0, weights) if row.min_p > 0 else weights
    order = _likeliest(logits, count)
    weights = _weights(logits[order], row.temperature)
    if row.min_p > 0:  # the likeliest weighs 1
        keep = int(np.searchsorted(-weights, -row.min_p, side="right"))
        order, weights = order[:keep], weights[:keep]
    if row.top_p < 1:
        # the smallest set of likeliest tokens that reaches top_p: the one that crosses it belongs to it
        reached = np.cumsum(weights)
        keep = int(np.searchsorted(reached, row.top_p * reached[-1])) + 1
        order, weights = order[:keep], weights[:keep]
    return order, weights


def _likeliest(logits: _FLOAT_ROW, count: int) -> npt.NDArray[np.intp]:
    """Ids of the `count` largest logits, largest first, ties by lowest id."""
    if count == 1:
        return np.array([logits.argmax()])
    if count >= len(logits):
        return np.argsort(-logits, kind="stable")
    smallest_kept = np.partition(logits, -count)[-count]
    # every tie with the last one kept stands here before the cut, so the lowest ids win
    able = np.flatnonzero(logits >= smallest_kept)
    return able[np.argsort(-logits[able], kind="stable")][:count]


def _weights(logits: _FLOAT_ROW, temperature: float) -> npt.NDArray[np.float64]:
    scaled = (logits.astype(np.float64) - float(logits.max())) / temperature
    return np.exp(scaled)


def _with_logprobs(logits: _FLOAT_ROW, token: int, count: int) -> TokenLogprob:
    largest = logits.max()
    # the exponentials in float32, a third of the time; their sum in float64: an error of about 1e-8
    norm = float(largest) + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    top = tuple((int(i), float(logits[i]) - norm) for i in _likeliest(logits, count)) if count > 0 else ()
    return TokenLogprob(token, float(logits[token]) - norm, top)
