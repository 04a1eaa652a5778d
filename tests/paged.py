"""Paged caches in ordinary memory and batches over them, for tests of operators and models."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.decoder import Decoder


def poisoned_kv(model: Decoder, num_blocks: int, block_size: int, layout: str) -> list[LayerKV]:
    """A model's cache, every element of it NaN."""
    dtype = model.dtype
    sizes = [spec.bytes_per_block * num_blocks for spec in model.cache_spec(block_size, layout).tensors]
    tensors = [torch.full((nbytes // dtype.itemsize,), torch.nan, dtype=dtype) for nbytes in sizes]

    def tensor(index, dtype, shape, strides, offset):
        assert tensors[index].dtype == dtype
        return tensors[index].as_strided(shape, strides, offset)

    return model.kv_views(tensor, block_size=block_size, num_blocks=num_blocks, layout=layout)


def batch_of(rows: Sequence[tuple[Sequence[int], int, Sequence[int]]], block_size: int) -> Batch:
    """A batch of (token ids, first position, blocks) rows; logits are wanted of every token."""
    lengths = torch.tensor([len(ids) for ids, _, _ in rows])
    widest = max(len(blocks) for _, _, blocks in rows)
    tables = torch.tensor([[*blocks, *[0] * (widest - len(blocks))] for _, _, blocks in rows], dtype=torch.int32)
    positions = torch.cat([torch.arange(start, start + len(ids)) for ids, start, _ in rows])
    row_of = torch.arange(len(rows)).repeat_interleave(lengths)
    return Batch(
        token_ids=torch.tensor([token for ids, _, _ in rows for token in ids]),
        positions=positions.int(),
        query_starts=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
        context_lens=torch.tensor([start + len(ids) for ids, start, _ in rows], dtype=torch.int32),
        block_tables=tables,
        slots=tables[row_of, positions // block_size].long() * block_size + positions % block_size,
        logit_rows=torch.arange(int(lengths.sum())),
    )
