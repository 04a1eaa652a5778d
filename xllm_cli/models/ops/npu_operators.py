"""The vendor's operators that npu.py calls, with the signatures of torch_npu 2.13.

Tests put references in their place, so a wrong argument shows without a device. What only a device can show is the
kernels' arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class NpuOperators(Protocol):
    """The vendor's operators used here, as torch.ops.npu has them; sizes as in ops/base.py."""

    def npu_rms_norm(
        self, input: torch.Tensor, gamma: torch.Tensor, epsilon: float, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed, 1 / rms); gamma has the input's type."""
        ...

    def npu_add_rms_norm(
        self, x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float, /
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(normed x1 + x2, 1 / rms, x1 + x2); all of one type."""
        ...

    def npu_rotary_mul(self, input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, /) -> torch.Tensor:
        """r1 · input + r2 · (-second half, first half): [1, T, N, D] with r1, r2 [1, T, 1, D]."""
        ...

    def npu_swiglu(self, input: torch.Tensor, dim: int, /) -> torch.Tensor:
        """silu(first half) · second half along `dim`."""
        ...

    def npu_scatter_pa_kv_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        cache_mode: str,
    ) -> None:
        """Put key and value, [T, G, D], at slots of caches [blocks, block_size, G, D] (cache_mode Norm)."""
        ...

    def npu_fused_infer_attention_score(  # noqa: PLR0913 - the vendor's signature
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        atten_mask: torch.Tensor,
        actual_seq_lengths: Sequence[int],
        actual_seq_lengths_kv: Sequence[int],
        block_table: torch.Tensor,
        num_heads: int,
        num_key_value_heads: int,
        scale: float,
        input_layout: str,
        sparse_mode: int,
        pre_tokens: int,
        next_tokens: int,
        block_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """([T, H, D], nothing) of queries [T, H, D] over caches [blocks, block_size, G·D]."""
        ...


class OperatorsElsewhere(NpuOperators, Protocol):
    """Operators of the same names on tensors of another device, for tests."""

    device: torch.device
