"""What npu_fused_infer_attention_score asks of its arguments, in the one way this product calls it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class OperatorError(RuntimeError):
    """A call that the vendor's operator refuses, or answers with garbage."""


def require(holds: bool, what: str) -> None:
    """OperatorError unless it holds."""
    if not holds:
        raise OperatorError(what)


class PagedCall:
    """The arguments of npu_fused_infer_attention_score as this product may give them: TND over a paged cache."""

    def __init__(  # noqa: PLR0913 - the vendor's signature
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        atten_mask: torch.Tensor | None = None,
        actual_seq_lengths: Sequence[int] | None = None,
        actual_seq_lengths_kv: Sequence[int] | None = None,
        block_table: torch.Tensor | None = None,
        num_heads: int = 1,
        num_key_value_heads: int = 0,
        scale: float = 1.0,
        input_layout: str = "BSH",
        sparse_mode: int = 0,
        pre_tokens: int = 2**31 - 1,
        next_tokens: int = 2**31 - 1,
        block_size: int = 0,
    ) -> None:
        """TypeError for an option that is not emulated: sinks, quantisation, ropes of MLA, shared prefixes."""
        require(input_layout == "TND" and query.dim() == 3, f"layout {input_layout}: only TND is emulated")
        require(sparse_mode in (3, 4) and atten_mask is not None, f"sparse_mode {sparse_mode} without its mask")
        require(block_table is not None, "the cache is paged: block_table is needed")
        require(None not in (actual_seq_lengths, actual_seq_lengths_kv), "TND needs both lengths")
        self.query, self.key, self.value = query, key, value
        self.actual_seq_lengths, self.actual_seq_lengths_kv = actual_seq_lengths, actual_seq_lengths_kv
        self.num_heads, self.num_key_value_heads, self.block_size = num_heads, num_key_value_heads, block_size
        self.block_table, self.scale = block_table, scale
        self.pre_tokens = 2**31 - 1 if sparse_mode == 3 else pre_tokens  # the causal mode ignores both
        require(sparse_mode == 3 or (pre_tokens >= 0 and next_tokens == 0), f"band {pre_tokens}, {next_tokens}")
        self._check_mask(atten_mask)
        self._check_heads()
        self._check_lengths()

    def _check_mask(self, mask: torch.Tensor) -> None:
        require(mask.dtype in (torch.int8, torch.uint8, torch.bool), f"mask of type {mask.dtype}")
        require(mask.shape == (2048, 2048) and mask.is_contiguous(), f"mask {list(mask.shape)} is not [2048, 2048]")
        hides = bool(mask.diagonal(1).all()) and not mask.diagonal(0).any() and not mask.diagonal(-1).any()
        require(hides, "the mask does not hide what lies above the diagonal")

    def _check_heads(self) -> None:
        _, heads, width = self.query.shape
        blocks, block_size, token_width = self.key.shape
        require(heads == self.num_heads <= 256, f"{self.num_heads} heads, query has {heads}")
        require(self.key.shape == self.value.shape, "key and value differ in shape")
        require(token_width == self.num_key_value_heads * width <= 65535, f"cache of {token_width} a token")
        require(heads % self.num_key_value_heads == 0 and heads <= 64 * self.num_key_value_heads, "groups of heads")
        require(width % 16 == 0 and width <= 512, f"head dimension {width}")
        require(block_size == self.block_size and block_size % 128 == 0 and block_size <= 512, f"block {block_size}")
        require(blocks > 0, "no blocks")

    def _check_lengths(self) -> None:
        ends, lengths, table = self.actual_seq_lengths, self.actual_seq_lengths_kv, self.block_table
        require(table.dtype == torch.int32 and table.dim() == 2 and table.is_contiguous(), "block_table int32 [B, n]")
        require(len(ends) == len(lengths) == table.shape[0], f"{len(ends)} and {len(lengths)} lengths, table {table}")
        require(ends[-1] == self.query.shape[0] <= 1 << 20, f"lengths end at {ends[-1]}, query has {len(self.query)}")
        for row, (first, end, length) in enumerate(zip([0, *ends], ends, lengths, strict=False)):
            require(0 <= end - first <= length, f"row {row}: queries {first} to {end}, {length} keys")
            used = -(-length // self.block_size)
            require(used <= table.shape[1], f"row {row}: {length} keys need {used} blocks of {table.shape[1]}")
            ids = table[row, :used].tolist()
            require(all(0 <= block < self.key.shape[0] for block in ids), f"row {row}: blocks {ids}")
