"""Operators of an Ascend device: torch_npu's fused ones where there are any, plain torch on the device's tensors else.

Owns how each vendor operator is called: which layout, which mode, which argument lives on the host. Knows no page, no
stream and no graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.nn import functional

from xllm_cli.errors import ModelError
from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.ops.base import Heads, Linear, Put, WeightMemory
from xllm_cli.models.ops.npu_operators import NpuOperators, OperatorsElsewhere

_MASK_SIDE = 2048  # the one size of mask that the causal and the band mode take, whatever the context
_CAUSAL, _BAND = 3, 4  # sparse modes, both counted from the last query and the last key
_MAX_HEAD_DIM = 512
_MAX_GROUP = 64  # query heads of one kv head
_MAX_HEADS = 256
_MAX_TOKEN_WIDTH = 65535  # elements of one token's keys in a layer
_EVERYTHING = 2**31 - 1  # tokens before a query that it sees


@dataclass(slots=True)
class PlacedBatch(Batch):
    """A batch on the device, with the lengths that attention wants on the host.

    query_ends   [R]  where each sequence's tokens end among the T
    kv_lengths   [R]  tokens of KV of each
    """

    query_ends: list[int]
    kv_lengths: list[int]


class Angles:
    """Cosines and sines of one batch's positions, looked up once a table though every layer asks for them."""

    def __init__(self) -> None:
        self._positions: torch.Tensor | None = None
        self._known: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def forget(self) -> None:
        """Look up again, even for the same tensor of positions: its elements may have changed."""
        self._positions = None

    def of(self, positions: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cosines, sines), each [1, T, 1, D]: both halves of a head turn by the same angles."""
        if positions is not self._positions:
            self._positions, self._known = positions, []
        for known, cosines, sines in self._known:
            if known is table:
                return cosines, sines
        cosine, sine = table.index_select(0, positions)[None, :, None].chunk(2, dim=-1)
        cosines, sines = torch.cat([cosine, cosine], dim=-1), torch.cat([sine, sine], dim=-1)
        self._known.append((table, cosines, sines))
        return cosines, sines


class TorchMemory:
    """Hands out memory of torch's allocator on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See WeightMemory."""
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)


class NpuOps:
    """Activations have the model's type. Not row-invariant: the vendor's kernels promise nothing of the kind.

    One caller at a time: what a batch's positions look up is kept until the next batch is placed.
    """

    kv_layout = "token_major"
    block_multiple = 128
    row_invariant = False

    def __init__(
        self,
        device_index: int = 0,
        operators: OperatorsElsewhere | None = None,
        *,
        memory: WeightMemory | None = None,
        put: Put | None = None,
    ) -> None:
        """torch_npu is loaded and the device set by then. `operators` replaces the vendor's and names its device.

        `memory`: where weights go; None is torch's allocator. `put`: what brings them there; None is a plain copy.
        """
        if operators is None:
            self.device = torch.device("npu", device_index)
            self._operators = cast(NpuOperators, torch.ops.npu)
        else:
            self.device = operators.device
            self._operators = operators
        self._memory = memory or TorchMemory(self.device)
        self._put: Put = put or torch.Tensor.copy_
        self._angles = Angles()
        self._mask = torch.ones((_MASK_SIDE, _MASK_SIDE), dtype=torch.int8).triu(1).to(self.device)

    def activation_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """See Ops. Asks the operator itself, by a call on next to nothing: it knows what it takes."""
        heads = Heads(1, 1, 16)
        cache = torch.zeros((1, self.block_multiple, 1, 16), dtype=model_dtype, device=self.device).transpose(1, 2)
        table, one = torch.zeros((1, 1), dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        ends = torch.tensor([0, 1], dtype=torch.int32)
        batch = Batch(one, ends[:1], ends, ends[1:], table, one, one)
        qkv = torch.zeros((1, 3 * 16), dtype=model_dtype, device=self.device)
        try:
            self.attention(qkv, LayerKV(cache, cache), self.place(batch), heads, scale=1.0, window=None)
        except RuntimeError as error:
            why = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
            raise ModelError(
                f"the npu's attention does not take {_name(model_dtype)}: {why}. Models of type bfloat16 are what it "
                "is made for: --dtype=bfloat16"
            ) from error
        return model_dtype

    def check_heads(self, heads: Heads) -> None:
        """See Ops."""
        too_wide = heads.num_kv_heads * heads.head_dim > _MAX_TOKEN_WIDTH or heads.num_heads > _MAX_HEADS
        if heads.head_dim % 16 or heads.head_dim > _MAX_HEAD_DIM or too_wide:
            fits = False
        else:
            fits = heads.num_heads <= _MAX_GROUP * heads.num_kv_heads
        if not fits:
            raise ModelError(
                f"{heads.num_heads} heads of {heads.head_dim} over {heads.num_kv_heads} kv heads are not supported on "
                f"npu: head_dim must be 16, 32, … {_MAX_HEAD_DIM}, with at most {_MAX_HEADS} heads, {_MAX_GROUP} a kv "
                f"head, and kv heads · head_dim at most {_MAX_TOKEN_WIDTH}"
            )

    def pack_linear(
        self, parts: Iterable[torch.Tensor], columns: int, depth: int, *, bias: torch.Tensor | None = None
    ) -> Linear:
        """See Ops: one matrix on the device, the bias in its type."""
        waiting = iter(parts)
        first = next(waiting)
        weight = self._memory.take((columns, depth), first.dtype)
        done = 0
        for part in (first, *waiting):
            self._put(weight[done : done + part.shape[0]], part)
            done += part.shape[0]
        assert done == columns
        packed_bias = None if bias is None else self._keep(bias.to(first.dtype))
        return Linear(weight, packed_bias, columns, depth, "plain", first.dtype)

    def pack_embedding(self, table: torch.Tensor, *, is_head: bool = True) -> Linear:
        """See Ops: as a head where it is one, else in the model's type."""
        if is_head:
            return self.pack_head(table)
        return self.pack_linear([table], *table.shape)

    def pack_head(self, weight: torch.Tensor) -> Linear:
        """See Ops: float32, twice the memory of bfloat16, since the matrix product rounds to its inputs' type."""
        columns, depth = weight.shape
        wide = self._memory.take((columns, depth), torch.float32)
        self._put(wide, weight)
        return Linear(wide, None, columns, depth, "wide", weight.dtype)

    def pack_norm(self, weight: torch.Tensor, model_dtype: torch.dtype) -> torch.Tensor:
        """See Ops: in the model's type if that keeps every value (a checkpoint's own do, 1 + w need not)."""
        narrow = weight.to(model_dtype)
        kept = narrow if torch.equal(narrow.float(), weight) else weight
        return self._keep(kept)

    def pack_rope(self, table: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return self._keep(table)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the memory of the weights."""
        kept = self._memory.take(tensor.shape, tensor.dtype)
        self._put(kept, tensor)
        return kept

    def place(self, batch: Batch) -> PlacedBatch:
        """See Ops. The lengths are read where they are: keep them on the host, else the device is waited for."""
        device = self.device
        self._angles.forget()
        return PlacedBatch(
            token_ids=batch.token_ids.to(device),
            positions=batch.positions.to(device),
            query_starts=batch.query_starts,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables.to(device),
            slots=batch.slots.to(device),
            logit_rows=batch.logit_rows.to(device),
            query_ends=batch.query_starts[1:].tolist(),
            kv_lengths=batch.context_lens.tolist(),
        )

    def embedding(self, token_ids: torch.Tensor, table: Linear) -> torch.Tensor:
        """See Ops."""
        return functional.embedding(token_ids, table.weight).to(table.dtype)

    def linear(self, x: torch.Tensor, weight: Linear) -> torch.Tensor:
        """See Ops."""
        return functional.linear(x, weight.weight, weight.bias)

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        """See Ops."""
        return functional.linear(x.float(), head.weight.float())

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops. The operator takes one type only: a wide weight makes everything wide."""
        return self._operators.npu_rms_norm(x.to(weight.dtype), weight, eps)[0].to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        if weight.dtype != x.dtype:
            residual += x
            return self.rms_norm(residual, weight, eps)
        normed, _, total = self._operators.npu_add_rms_norm(x, residual, weight, eps)
        residual.copy_(total)
        return normed

    def head_rms_norm(
        self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, heads: Heads, *, eps: float
    ) -> None:
        """See Ops."""
        queries, keys, _ = _sides(qkv, heads)
        for side, weight in ((queries, q_weight), (keys, k_weight)):
            side.copy_(self.rms_norm(side.contiguous(), weight, eps))

    def rope(self, qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, heads: Heads) -> None:
        """See Ops. Turned in float32: the angles of late positions do not fit into 16 bits."""
        num_turned = heads.num_heads + heads.num_kv_heads
        turned = qkv.view(1, qkv.shape[0], -1, heads.head_dim)[:, :, :num_turned]
        turned.copy_(self._operators.npu_rotary_mul(turned.float().contiguous(), *self._angles.of(positions, table)))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return self._operators.npu_swiglu(gate_up, -1)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops: plain torch, for the fused operator does not say how it rounds."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)

    def write_kv(self, qkv: torch.Tensor, kv: LayerKV, slots: torch.Tensor, heads: Heads) -> None:
        """See Ops. Slots must differ from each other."""
        _, keys, values = _sides(qkv, heads)
        self._operators.npu_scatter_pa_kv_cache(
            keys.contiguous(),
            values.contiguous(),
            kv.k.transpose(1, 2),
            kv.v.transpose(1, 2),
            slots,
            cache_mode="Norm",
        )

    def attention(
        self, qkv: torch.Tensor, kv: LayerKV, batch: Batch, heads: Heads, *, scale: float, window: int | None
    ) -> torch.Tensor:
        """See Ops: prefill, decode and both together are one call, tokens of all sequences in a row (TND)."""
        assert isinstance(batch, PlacedBatch), "Ops.place makes batches for attention"
        queries, _, _ = _sides(qkv, heads)
        shape = (kv.k.shape[0], kv.block_size, -1)
        attended, _ = self._operators.npu_fused_infer_attention_score(
            queries.contiguous(),
            kv.k.transpose(1, 2).view(shape),
            kv.v.transpose(1, 2).view(shape),
            atten_mask=self._mask,
            actual_seq_lengths=batch.query_ends,
            actual_seq_lengths_kv=batch.kv_lengths,
            block_table=batch.block_tables,
            num_heads=heads.num_heads,
            num_key_value_heads=heads.num_kv_heads,
            scale=scale,
            input_layout="TND",
            sparse_mode=_CAUSAL if window is None else _BAND,
            pre_tokens=_EVERYTHING if window is None else window - 1,  # besides the token itself
            next_tokens=0,
            block_size=kv.block_size,
        )
        return attended.view(qkv.shape[0], -1)


def _sides(qkv: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of queries [T, H, D], keys and values [T, G, D]."""
    each = qkv.view(qkv.shape[0], -1, heads.head_dim)
    first, last = heads.num_heads, heads.num_heads + heads.num_kv_heads
    return each[:, :first], each[:, first:last], each[:, last:]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
