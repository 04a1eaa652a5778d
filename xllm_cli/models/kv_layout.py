"""The ways a model's KV lies in memory, as cache tensors and as the views its layers use.

    interleaved   one tensor   block b: [layer][k | v][head][token][dim]
    per_layer     2·layers     block b of tensor 2·layer (k) or 2·layer + 1 (v): [head][token][dim]
    token_major   2·layers     the same tensors: [token][head][dim]

The first two are the same to an operator: blocks that are contiguous in themselves, at some distance from each other.
A view has its heads before its tokens in every layout; in the third its strides tell the other order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch

from xllm_cli.core import CacheSpec, TensorSpec
from xllm_cli.models.batch import LayerKV

Layout = Literal["interleaved", "per_layer", "token_major"]


class TensorFactory(Protocol):
    """Makes a strided view of cache tensor `index`; strides and offset count elements of `dtype`."""

    def __call__(
        self, index: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int, /
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Sizes of a model's KV and how it is laid out."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    layout: str

    def __post_init__(self) -> None:
        if self.layout not in get_args(Layout):
            raise ValueError(f"KV layout {self.layout!r} is none of {', '.join(get_args(Layout))}")

    @property
    def side_elements(self) -> int:
        """Elements of one block, one layer, keys or values."""
        return self.kv_heads * self.block_size * self.head_dim

    def spec(self) -> CacheSpec:
        """The tensors the cache has to provide."""
        side_bytes = self.side_elements * self.dtype.itemsize
        if self.layout == "interleaved":
            return CacheSpec(self.block_size, (TensorSpec("kv", 2 * self.num_layers * side_bytes),))
        names = [f"layers.{layer}.{side}" for layer in range(self.num_layers) for side in "kv"]
        return CacheSpec(self.block_size, tuple(TensorSpec(name, side_bytes) for name in names))

    def views(self, tensor: TensorFactory, num_blocks: int) -> list[LayerKV]:
        """One LayerKV a layer over tensors of `num_blocks` blocks; nothing is read or written."""
        shape = (num_blocks, self.kv_heads, self.block_size, self.head_dim)
        if self.layout == "token_major":
            inner = (self.head_dim, self.kv_heads * self.head_dim, 1)
        else:
            inner = (self.block_size * self.head_dim, self.head_dim, 1)

        def side(layer: int, which: int) -> torch.Tensor:
            place = 2 * layer + which
            if self.layout == "interleaved":
                index, offset, block_stride = 0, place * self.side_elements, 2 * self.num_layers * self.side_elements
            else:
                index, offset, block_stride = place, 0, self.side_elements
            return tensor(index, self.dtype, shape, (block_stride, *inner), offset)

        return [LayerKV(side(layer, 0), side(layer, 1)) for layer in range(self.num_layers)]
