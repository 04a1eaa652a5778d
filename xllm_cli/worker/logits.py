"""What a request asks to be done to the logits of its next token: penalties, bias, what may not come, in this order.

Functions of one row and its own tokens, so that a row's token never depends on the rows beside it and a recomputed row
gets what it got before. Knows neither requests nor how a token is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from xllm_cli.core import LogitChanges

_FLOAT_ROW = npt.NDArray[np.float32]


def changed(logits: _FLOAT_ROW, changes: LogitChanges | None, forbidden: Sequence[int]) -> _FLOAT_ROW:
    """A changed copy of one row of logits, [vocabulary] float32. Ids beyond the vocabulary change nothing."""
    logits = logits.copy()
    if changes is not None:
        _penalise(logits, changes)
        _add_bias(logits, changes.bias)
    if changes is not None and changes.allowed is not None:
        logits[~_allowed(changes.allowed, forbidden, len(logits))] = -np.inf
    elif forbidden:
        logits[_known(forbidden, len(logits))] = -np.inf
    return logits


def _allowed(mask: bytes, forbidden: Sequence[int], vocabulary: int) -> npt.NDArray[np.bool_]:
    """Which tokens a grammar allows, less the forbidden ones unless nothing would be left: a text must end somehow."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=vocabulary, bitorder="little").astype(np.bool_)
    if forbidden:
        fewer = bits.copy()
        fewer[_known(forbidden, vocabulary)] = False
        return fewer if fewer.any() else bits
    return bits


def _penalise(logits: _FLOAT_ROW, changes: LogitChanges) -> None:
    """Repetition (Keskar et al. 2019) over prompt and output, then OpenAI's frequency and presence over the output."""
    if not changes.history:
        return
    history = np.array(changes.history)
    if changes.repetition != 1.0:
        seen = np.unique(history)
        values = logits[seen]
        factor = np.float32(changes.repetition)
        logits[seen] = np.where(values > 0, values / factor, values * factor)
    if changes.frequency != 0.0 or changes.presence != 0.0:
        generated, times = np.unique(history[changes.num_prompt :], return_counts=True)
        logits[generated] -= (changes.frequency * times + changes.presence).astype(np.float32)


def _add_bias(logits: _FLOAT_ROW, bias: Sequence[tuple[int, float]]) -> None:
    for token, value in bias:
        if 0 <= token < len(logits):
            logits[token] += np.float32(value)


def _known(tokens: Sequence[int], vocabulary: int) -> list[int]:
    return [token for token in tokens if 0 <= token < vocabulary]
