"""What one forward pass runs on: the tokens of a step and where their keys and values live."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Batch:
    """T tokens of R sequences, one sequence's after another's. All tensors contiguous.

    They lie in host memory; `Ops.place` brings a batch to where the operators want it.

    token_ids     [T] int64
    positions     [T] int32  absolute
    query_starts  [R + 1] int32  tokens query_starts[i] … query_starts[i + 1] belong to sequence i
    context_lens  [R] int32  tokens of KV, this step's included
    block_tables  [R, max_blocks] int32  blocks of each sequence, in order; the rest of a row is never read
    slots         [T] int64  block · block_size + offset of each token's KV
    logit_rows    [S] int64  the tokens whose logits are wanted
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor


@dataclass(slots=True, repr=False)
class LayerKV:
    """One layer's cache: k and v are [num_blocks, kv_heads, block_size, head_dim], each block without gaps.

    The distance between blocks is free, so that layouts of the cache are the same to an operator, but for the order
    inside a block: head by head, or token by token where the operators ask for it (kv_layout.py).
    """

    k: torch.Tensor
    v: torch.Tensor

    def __post_init__(self) -> None:
        _, heads, block_size, head_dim = self.k.shape
        orders = ((block_size * head_dim, head_dim, 1), (head_dim, heads * head_dim, 1))
        if self.k.shape != self.v.shape or self.k.stride()[1:] not in orders or self.v.stride() != self.k.stride():
            raise ValueError(f"no blocks: k {self.k.shape} {self.k.stride()}, v {self.v.shape} {self.v.stride()}")

    def __repr__(self) -> str:
        """Shapes only: a tensor's own repr reads elements, and a page that is not mapped kills the process."""
        return f"LayerKV({tuple(self.k.shape)}, {self.k.dtype}, block_stride={self.block_stride})"

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.k.shape[2]

    @property
    def block_stride(self) -> int:
        """Elements from one block to the next."""
        return self.k.stride(0)
