"""Every operator in plain torch, written to be read: the oracle of the other implementations' tests."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.ops.base import Heads, Linear


class ReferenceOps:
    """Computes in float32 and rounds once to the type of activations. Slow, not row-invariant."""

    kv_layout = "interleaved"
    block_multiple = 1
    row_invariant = False

    def __init__(self, *, wide: bool = True) -> None:
        """`wide`: activations are float32 for every model, as on the cpu; else they have the model's type."""
        self._wide = wide

    def activation_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """See Ops."""
        return torch.float32 if self._wide else model_dtype

    def check_heads(self, heads: Heads) -> None:
        """See Ops: any will do."""

    def pack_linear(
        self, parts: Iterable[torch.Tensor], columns: int, depth: int, *, bias: torch.Tensor | None = None
    ) -> Linear:
        """See Ops: nothing to pack."""
        weight = torch.cat(list(parts))
        assert weight.shape == (columns, depth)
        return Linear(weight, None if bias is None else bias.float(), columns, depth, "plain", weight.dtype)

    def pack_embedding(self, table: torch.Tensor, *, is_head: bool = True) -> Linear:
        """See Ops."""
        return self.pack_linear([table], *table.shape)

    def pack_head(self, weight: torch.Tensor) -> Linear:
        """See Ops."""
        return self.pack_linear([weight], *weight.shape)

    def pack_norm(self, weight: torch.Tensor, model_dtype: torch.dtype) -> torch.Tensor:
        """See Ops: as it is."""
        return weight

    def pack_rope(self, table: torch.Tensor) -> torch.Tensor:
        """See Ops: as it is."""
        return table

    def place(self, batch: Batch) -> Batch:
        """See Ops: as it is."""
        return batch

    def embedding(self, token_ids: torch.Tensor, table: Linear) -> torch.Tensor:
        """See Ops."""
        return table.weight[token_ids].to(self.activation_dtype(table.dtype))

    def linear(self, x: torch.Tensor, weight: Linear) -> torch.Tensor:
        """See Ops."""
        return self.logits(x, weight).to(x.dtype)

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        """See Ops."""
        product = x.float() @ head.weight.float().T
        return product if head.bias is None else product + head.bias

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight * scaled).to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        residual += x
        return self.rms_norm(residual, weight, eps)

    def head_rms_norm(
        self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, heads: Heads, *, eps: float
    ) -> None:
        """See Ops."""
        both = qkv.view(qkv.shape[0], -1, heads.head_dim)
        queries, keys = both[:, : heads.num_heads], both[:, heads.num_heads : heads.num_heads + heads.num_kv_heads]
        queries.copy_(self.rms_norm(queries, q_weight, eps))
        keys.copy_(self.rms_norm(keys, k_weight, eps))

    def rope(self, qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, heads: Heads) -> None:
        """See Ops."""
        turned = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        x = qkv[:, :turned].view(qkv.shape[0], -1, heads.head_dim)
        cosine, sine = table[positions.long()][:, None].chunk(2, dim=-1)
        low, high = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)

    def write_kv(self, qkv: torch.Tensor, kv: LayerKV, slots: torch.Tensor, heads: Heads) -> None:
        """See Ops."""
        sides = qkv.view(qkv.shape[0], -1, heads.head_dim)[:, heads.num_heads :]
        block, offset = slots // kv.block_size, slots % kv.block_size
        kv.k[block, :, offset] = sides[:, : heads.num_kv_heads].to(kv.k.dtype)
        kv.v[block, :, offset] = sides[:, heads.num_kv_heads :].to(kv.v.dtype)

    def attention(
        self, qkv: torch.Tensor, kv: LayerKV, batch: Batch, heads: Heads, *, scale: float, window: int | None
    ) -> torch.Tensor:
        """See Ops: gather the keys and values of each sequence, then a masked softmax."""
        queries = qkv.view(qkv.shape[0], -1, heads.head_dim)[:, : heads.num_heads]
        out = torch.empty_like(queries)
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        for row, context in enumerate(contexts):
            tokens = torch.arange(context)
            block = batch.block_tables[row].long()[tokens // kv.block_size]
            k = kv.k[block, :, tokens % kv.block_size].float()  # [context, G, D]
            v = kv.v[block, :, tokens % kv.block_size].float()
            first, last = starts[row], starts[row + 1]
            q = (
                queries[first:last].float().view(last - first, heads.num_kv_heads, -1, heads.head_dim)
            )  # [n, G, H / G, D]
            scores = torch.einsum("nghd,tgd->nght", q, k) * scale
            own = torch.arange(context - (last - first), context)[:, None, None, None]
            hidden = tokens > own if window is None else (tokens > own) | (tokens <= own - window)
            scores = scores.masked_fill(hidden, -torch.inf)
            out[first:last] = torch.einsum("nght,tgd->nghd", scores.softmax(-1), v).flatten(1, 2).to(out.dtype)
        return out.flatten(1)
