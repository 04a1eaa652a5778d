"""Operators of a processor: native kernels (native/kernels) over packed weights. Row-invariant to the bit.

`linear` is the native product, or oneDNN's where the processor multiplies bf16 itself. In float32 the native one is the
faster: 93 against 75 GFLOP/s a thread on Zen 3 at 512 rows, 88 against 54 at 8 rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

import torch  # before _kernels, which uses the OpenMP runtime torch loads

from xllm_cli import _kernels
from xllm_cli.errors import ModelError
from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.ops import onednn
from xllm_cli.models.ops.base import Heads, Linear, WeightMemory

_CODES = {torch.float32: 0, torch.bfloat16: 1}
_PANEL = 16
_HEAD_DIMS = range(16, 257, 16)
_MAX_GROUP = 32  # query heads of one kv head
_PIECE_BYTES = 64 << 20


class HeapMemory:
    """Hands out weights from large pieces of memory that ask for 2 MiB pages, which read faster than 4 KiB ones."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory that lives as long as the tensor. What is not handed out is never touched."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self._used + nbytes > self._piece.numel():
            self._piece = torch.empty(max(nbytes, _PIECE_BYTES), dtype=torch.uint8)
            self._used = 0
            _kernels.prefer_huge_pages(self._piece.data_ptr(), self._piece.numel())
        taken = self._piece[self._used : self._used + nbytes]
        self._used += -(-nbytes // 64) * 64
        return taken.view(dtype).view(shape)


class CpuOps:
    """One caller at a time: the kernels share scratch memory.

    Activations are float32 for every model: the kernels compute in float32 anyway, so rounding between them would cost
    conversions and accuracy.
    """

    kv_layout = "interleaved"
    block_multiple = 1
    row_invariant = True

    def __init__(
        self,
        level: str = "auto",
        *,
        prepacked: Collection[torch.dtype] | None = None,
        memory: WeightMemory | None = None,
    ) -> None:
        """`level`: instructions the kernels may use. `prepacked`: types whose linears are oneDNN's; None probes.

        `memory`: where weights go; None is the heap. oneDNN keeps what it packs in memory of its own, so with another
        memory all linears are ours.
        """
        self._kernels = _kernels.Kernels(level)
        self._memory = memory or HeapMemory()
        if memory is not None:
            prepacked = ()
        if prepacked is None:
            prepacked = [torch.bfloat16] if onednn.is_usable(torch.bfloat16) else []
        self._prepacked = frozenset(prepacked)

    def activation_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """See Ops."""
        return torch.float32

    def check_heads(self, heads: Heads) -> None:
        """See Ops."""
        if heads.head_dim not in _HEAD_DIMS or heads.num_heads > _MAX_GROUP * heads.num_kv_heads:
            raise ModelError(
                f"{heads.num_heads} heads of {heads.head_dim} over {heads.num_kv_heads} kv heads are not supported on "
                f"the cpu: head_dim must be 16, 32, … 256, with at most {_MAX_GROUP} heads a kv head"
            )

    def pack_linear(
        self, parts: Iterable[torch.Tensor], columns: int, depth: int, *, bias: torch.Tensor | None = None
    ) -> Linear:
        """See Ops."""
        waiting = iter(parts)
        first = next(waiting)
        if first.dtype in self._prepacked:
            weight = onednn.pack(torch.cat([first, *waiting]))
            narrow = None if bias is None else bias.to(first.dtype)
            return Linear(weight, narrow, columns, depth, "onednn", first.dtype)
        panels = self._pack_panels(itertools.chain([first], waiting), columns, depth, dtype=first.dtype)
        kept = None if bias is None else self._keep(bias.float())
        return Linear(panels, kept, columns, depth, "panels", first.dtype)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the memory of the weights."""
        return self._memory.take(tensor.shape, tensor.dtype).copy_(tensor)

    def _pack_panels(
        self, parts: Iterable[torch.Tensor], columns: int, depth: int, *, dtype: torch.dtype
    ) -> torch.Tensor:
        """Panels of 16 output columns, [panel][depth][16]; the last is filled up with zeros."""
        packed = self._memory.take((-(-columns // _PANEL), depth, _PANEL), dtype)
        packed[-1].zero_()
        done = 0
        for part in parts:
            rows = part.contiguous()
            assert rows.dtype == dtype and rows.shape[1] == depth and done + rows.shape[0] <= columns
            _kernels.pack_rows(rows.data_ptr(), packed.data_ptr(), done, rows.shape[0], depth, _CODES[dtype])
            done += rows.shape[0]
        assert done == columns
        return packed

    def pack_embedding(self, table: torch.Tensor, *, is_head: bool = True) -> Linear:
        """See Ops: packed as a head is, so that a tied head costs no second copy."""
        return self.pack_head(table)

    def pack_head(self, weight: torch.Tensor) -> Linear:
        """See Ops: always panels, since logits leave the sum unrounded."""
        columns, depth = weight.shape
        panels = self._pack_panels([weight], columns, depth, dtype=weight.dtype)
        return Linear(panels, None, columns, depth, "panels", weight.dtype)

    def pack_norm(self, weight: torch.Tensor, model_dtype: torch.dtype) -> torch.Tensor:
        """See Ops: as it is."""
        return self._keep(weight)

    def pack_rope(self, table: torch.Tensor) -> torch.Tensor:
        """See Ops: as it is."""
        return self._keep(table)

    def place(self, batch: Batch) -> Batch:
        """See Ops: as it is."""
        return batch

    def embedding(self, token_ids: torch.Tensor, table: Linear) -> torch.Tensor:
        """See Ops. Ids must lie in the table."""
        out = torch.empty((token_ids.shape[0], table.depth))
        rows, code = token_ids.shape[0], _CODES[table.dtype]
        self._kernels.embedding(token_ids.data_ptr(), table.weight.data_ptr(), out.data_ptr(), rows, table.depth, code)
        return out

    def linear(self, x: torch.Tensor, weight: Linear) -> torch.Tensor:
        """See Ops. oneDNN's takes and gives the weight's type."""
        if weight.form == "onednn":
            return onednn.multiply(x.to(weight.dtype), weight.weight, weight.bias).float()
        return self.logits(x, weight)

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        """See Ops."""
        rows, depth = x.shape
        assert depth == head.depth and x.dtype == torch.float32 and x.is_contiguous()
        out = torch.empty((rows, head.columns))
        self._kernels.linear(
            x.data_ptr(),
            head.weight.data_ptr(),
            0 if head.bias is None else head.bias.data_ptr(),
            out.data_ptr(),
            rows,
            head.columns,
            depth,
            _CODES[head.dtype],
        )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        assert x.dtype == weight.dtype == torch.float32
        out = torch.empty_like(x)
        self._kernels.norm(x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps)
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        assert x.shape == residual.shape and x.dtype == residual.dtype == weight.dtype == torch.float32
        rows, width = x.shape
        out = torch.empty_like(x)
        self._kernels.norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps)
        return out

    def head_rms_norm(
        self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, heads: Heads, *, eps: float
    ) -> None:
        """See Ops."""
        assert qkv.dtype == q_weight.dtype == k_weight.dtype == torch.float32
        rows, stride = qkv.shape
        self._kernels.head_norm(qkv.data_ptr(), q_weight.data_ptr(), k_weight.data_ptr(), rows, stride, *heads, eps)

    def rope(self, qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, heads: Heads) -> None:
        """See Ops. Positions must lie in the table."""
        assert qkv.dtype == torch.float32
        rows, stride = qkv.shape
        turned = heads.num_heads + heads.num_kv_heads
        self._kernels.rope(qkv.data_ptr(), positions.data_ptr(), table.data_ptr(), rows, stride, turned, heads.head_dim)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        assert gate_up.dtype == torch.float32
        rows, both = gate_up.shape
        out = torch.empty((rows, both // 2))
        self._kernels.silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, both // 2)
        return out

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        assert gate_up.dtype == torch.float32
        rows, both = gate_up.shape
        out = torch.empty((rows, both // 2))
        self._kernels.gelu_mul(gate_up.data_ptr(), out.data_ptr(), rows, both // 2)
        return out

    def write_kv(self, qkv: torch.Tensor, kv: LayerKV, slots: torch.Tensor, heads: Heads) -> None:
        """See Ops. Slots must lie in the cache."""
        assert qkv.dtype == torch.float32
        rows, stride = qkv.shape
        item = qkv.element_size() * heads.head_dim
        keys = qkv.data_ptr() + heads.num_heads * item
        self._kernels.write_kv(
            keys,
            keys + heads.num_kv_heads * item,
            kv.k.data_ptr(),
            kv.v.data_ptr(),
            slots.data_ptr(),
            rows,
            stride,
            heads.num_kv_heads,
            heads.head_dim,
            kv.block_size,
            kv.block_stride,
            _CODES[kv.k.dtype],
        )

    def attention(
        self, qkv: torch.Tensor, kv: LayerKV, batch: Batch, heads: Heads, *, scale: float, window: int | None
    ) -> torch.Tensor:
        """See Ops. Heads must be those `check_heads` accepts."""
        assert qkv.dtype == torch.float32
        rows, stride = qkv.shape
        out = torch.empty((rows, heads.num_heads * heads.head_dim))
        requests, max_blocks = batch.block_tables.shape
        self._kernels.attention(
            qkv.data_ptr(),
            kv.k.data_ptr(),
            kv.v.data_ptr(),
            out.data_ptr(),
            batch.query_starts.data_ptr(),
            batch.context_lens.data_ptr(),
            batch.block_tables.data_ptr(),
            requests,
            stride,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            kv.block_size,
            kv.block_stride,
            max_blocks,
            window or 0,
            scale,
            _CODES[kv.k.dtype],
        )
        return out
