"""The operators a model file may call, and what an implementation says about itself.

T tokens, a width W, H query heads and G kv heads of dimension D. `qkv` is [T, (H + 2·G) · D]: queries, keys, values.
Matrices are [rows, width] and contiguous. A model's type (float32 or bfloat16) is that of its weight matrices and its
KV. What runs between operators, the activations, has the type the operators choose for it. Norm weights, biases and
sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from xllm_cli.models.batch import Batch, LayerKV


class Heads(NamedTuple):
    """Query heads, kv heads and the dimension of each."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(slots=True)
class Linear:
    """A weight in the form its operators like best (`form`), standing for [columns, depth], and its bias [columns].

    `dtype` is the model's type, whatever the form's.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    columns: int
    depth: int
    form: str
    dtype: torch.dtype


# Fills memory of the operators' device from a tensor of the host of the same shape, in the type of the former: at once,
# or by when whoever gave it says that all is done. The tensor of the host may go when it has returned.
Put = Callable[[torch.Tensor, torch.Tensor], object]


class WeightMemory(Protocol):
    """Where the operators of one model put its parameters and tables."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory of the operators' device for one of them, contiguous; it stays where it is."""
        ...


class Ops(Protocol):
    """One device's operators. Results are new tensors unless "in place" is said.

    kv_layout       how a cache should lie: interleaved, per_layer or token_major (models/kv_layout.py)
    block_multiple  block sizes are multiples of this
    row_invariant   a row of a result depends only on that row and its own KV: never on the batch, chunks or threads

    Weights, tables and batches reach the operators in the form that `pack_…` and `place` give them.
    """

    kv_layout: str
    block_multiple: int
    row_invariant: bool

    def activation_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The type `embedding` gives and every other operator takes and keeps, in a model of that type.

        ModelError if such a model cannot run here.
        """
        ...

    def check_heads(self, heads: Heads) -> None:
        """ModelError if `attention` cannot take heads of these numbers and dimension."""
        ...

    def pack_linear(
        self, parts: Iterable[torch.Tensor], columns: int, depth: int, *, bias: torch.Tensor | None = None
    ) -> Linear:
        """Pack weights [columns_i, depth], one above the other, taking one at a time; Σ columns_i = columns."""
        ...

    def pack_embedding(self, table: torch.Tensor, *, is_head: bool = True) -> Linear:
        """Pack [vocab, width] for `embedding` and, where it is the head too, for `logits`."""
        ...

    def pack_head(self, weight: torch.Tensor) -> Linear:
        """Pack [vocab, width] for `logits`."""
        ...

    def pack_norm(self, weight: torch.Tensor, model_dtype: torch.dtype) -> torch.Tensor:
        """Pack the weight of a norm, [W] float32, for a model of that type."""
        ...

    def pack_rope(self, table: torch.Tensor) -> torch.Tensor:
        """Pack a table of angles, [P, cos D/2 | sin D/2] float32, for `rope`."""
        ...

    def place(self, batch: Batch) -> Batch:
        """The batch as the operators of one forward pass want it."""
        ...

    def embedding(self, token_ids: torch.Tensor, table: Linear) -> torch.Tensor:
        """Rows of the table as activations: [T] int64 → [T, width]."""
        ...

    def linear(self, x: torch.Tensor, weight: Linear) -> torch.Tensor:
        """x · weightᵀ + bias: [T, depth] → [T, columns], in x's type."""
        ...

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        """x · headᵀ: [S, width] → [S, vocab] float32, never rounded to x's type."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) · weight [W], rounded once to x's type."""
        ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += x in place; then the norm of residual."""
        ...

    def head_rms_norm(
        self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, heads: Heads, *, eps: float
    ) -> None:
        """The norm of every query head, weights q_weight [D], and every key head, k_weight [D], in place."""
        ...

    def rope(self, qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, heads: Heads) -> None:
        """Turn queries and keys in place: pairs (i, i + D/2) by the angles of table [P, cos D/2 | sin D/2]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) · up: [T, 2·W] → [T, W]."""
        ...

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gelu(gate) · up: [T, 2·W] → [T, W], with gelu(x) = x / 2 · (1 + tanh(√(2/π) · (x + 0.044715·x³)))."""
        ...

    def write_kv(self, qkv: torch.Tensor, kv: LayerKV, slots: torch.Tensor, heads: Heads) -> None:
        """Put keys and values of token t, rounded to the cache's type, at slot slots[t]."""
        ...

    def attention(
        self, qkv: torch.Tensor, kv: LayerKV, batch: Batch, heads: Heads, *, scale: float, window: int | None
    ) -> torch.Tensor:
        """Causal attention of the batch's queries over their cached KV, scores times scale: [T, H·D].

        A token sees itself and the `window` - 1 tokens before it; None: all before it.

        Memory of masked or unused positions may hold anything, NaN too.
        """
        ...
