"""From the rows of a plan to the tensors of a batch. Knows block arithmetic, not pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from xllm_cli.core import Row
from xllm_cli.models.batch import Batch


def build_batch(rows: Sequence[Row], block_size: int) -> Batch:
    """All rows' tokens one after another; see Batch for the shapes. Rows need blocks for every position they write.

    The logits are those of tokens to draw first, then those that score tokens of prompts, each in row order.
    """
    lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int32)
    starts = np.array([row.start for row in rows], dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    tables = np.zeros((len(rows), max(len(row.blocks) for row in rows)), dtype=np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row.blocks)] = row.blocks
    row_of = np.repeat(np.arange(len(rows)), lengths)
    positions = np.arange(ends[-1], dtype=np.int32) + np.repeat(starts - (ends - lengths), lengths)
    slots = tables[row_of, positions // block_size].astype(np.int64) * block_size + positions % block_size
    drawn = [end - 1 for end, row in zip(ends.tolist(), rows, strict=True) if row.sampling is not None]
    scored = [
        start + row.scoring.first + index
        for start, row in zip((ends - lengths).tolist(), rows, strict=True)
        if row.scoring is not None
        for index in range(len(row.scoring.targets))
    ]
    return Batch(
        token_ids=torch.tensor([token for row in rows for token in row.token_ids], dtype=torch.int64),
        positions=torch.from_numpy(positions),
        query_starts=torch.from_numpy(np.concatenate([np.zeros(1, np.int32), ends])),
        context_lens=torch.from_numpy(starts + lengths),
        block_tables=torch.from_numpy(tables),
        slots=torch.from_numpy(slots),
        logit_rows=torch.tensor(drawn + scored, dtype=torch.int64),
    )
