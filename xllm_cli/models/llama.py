"""The Llama family: pre-norm decoder layers of grouped-query attention with rotary positions and a SwiGLU network.

Knows sizes and weight names; how anything is computed or packed is its operators' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from xllm_cli.core import CacheSpec
from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.config import ModelConfig
from xllm_cli.models.kv_layout import KvLayout, TensorFactory
from xllm_cli.models.ops.base import Heads, Linear, Ops
from xllm_cli.models.rope import rope_table
from xllm_cli.models.weights import WeightReader


@dataclass(slots=True)
class Layer:
    """The weights of one decoder layer: q, k and v in one matrix, gate and up in one."""

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """A Llama model on some device's operators."""

    def __init__(self, config: ModelConfig, ops: Ops, weights: Mapping[str, torch.Tensor], dtype: str) -> None:
        self.config = config
        self.ops = ops
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self.rope = rope_table(config.rope, config.head_dim, config.max_positions)
        self._load(WeightReader(weights, self.dtype))

    def _load(self, reader: WeightReader) -> None:
        config, ops = self.config, self.ops
        table = (config.vocab_size, config.hidden_size)
        self.embedding = ops.pack_embedding(reader.read("model.embed_tokens.weight", *table))
        self.layers = [self._load_layer(reader, f"model.layers.{i}.") for i in range(config.num_layers)]
        self.norm = reader.keep("model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            self.head = self.embedding
        else:
            self.head = ops.pack_head(reader.read("lm_head.weight", *table))
        reader.finish("rotary_emb.inv_freq", *(["lm_head.weight"] if config.tie_word_embeddings else []))

    def _load_layer(self, reader: WeightReader, prefix: str) -> Layer:
        config, heads = self.config, self.heads
        width, inner = config.hidden_size, config.intermediate_size
        q_width, kv_width = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim

        def linear(names: dict[str, int], depth: int, has_bias: bool) -> Linear:
            """One Linear whose output is that of the named ones side by side; each is read, packed and dropped."""
            parts = (reader.read(f"{prefix}{name}.weight", rows, depth) for name, rows in names.items())
            biases = [reader.keep(f"{prefix}{name}.bias", rows) for name, rows in names.items() if has_bias]
            bias = torch.cat(biases) if biases else None
            return self.ops.pack_linear(parts, sum(names.values()), depth, bias=bias)

        qkv = {"self_attn.q_proj": q_width, "self_attn.k_proj": kv_width, "self_attn.v_proj": kv_width}
        return Layer(
            attention_norm=reader.keep(prefix + "input_layernorm.weight", width),
            qkv=linear(qkv, width, config.attention_bias),
            output=linear({"self_attn.o_proj": width}, q_width, config.attention_bias),
            mlp_norm=reader.keep(prefix + "post_attention_layernorm.weight", width),
            gate_up=linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, width, config.mlp_bias),
            down=linear({"mlp.down_proj": width}, inner, config.mlp_bias),
        )

    def _kv_layout(self, block_size: int, layout: str | None) -> KvLayout:
        return KvLayout(
            self.config.num_layers,
            self.heads.num_kv_heads,
            self.heads.head_dim,
            self.dtype,
            block_size,
            self.ops.kv_layout if layout is None else layout,
        )

    def cache_spec(self, block_size: int, layout: str | None = None) -> CacheSpec:
        """The KV tensors for blocks of `block_size` tokens; `layout` defaults to the operators'."""
        return self._kv_layout(block_size, layout).spec()

    def kv_views(
        self, tensor: TensorFactory, *, block_size: int, num_blocks: int, layout: str | None = None
    ) -> list[LayerKV]:
        """One LayerKV a layer over the tensors of `cache_spec`, each of `num_blocks` blocks."""
        return self._kv_layout(block_size, layout).views(tensor, num_blocks)

    def forward(self, batch: Batch, kv: list[LayerKV]) -> torch.Tensor:
        """Write the KV of the batch's T tokens into `kv` and return the logits of `logit_rows`, [S, vocab] float32."""
        ops, heads, eps = self.ops, self.heads, self.config.rms_norm_eps
        residual = ops.embedding(batch.token_ids, self.embedding)
        update: torch.Tensor | None = None
        for layer, cache in zip(self.layers, kv, strict=True):
            if update is None:
                hidden = ops.rms_norm(residual, layer.attention_norm, eps)
            else:
                hidden = ops.add_rms_norm(update, residual, layer.attention_norm, eps)
            qkv = ops.linear(hidden, layer.qkv)
            ops.rope(qkv, batch.positions, self.rope, heads)
            ops.write_kv(qkv, cache, batch.slots, heads)
            attended = ops.attention(qkv, cache, batch, heads)
            hidden = ops.add_rms_norm(ops.linear(attended, layer.output), residual, layer.mlp_norm, eps)
            update = ops.linear(ops.silu_mul(ops.linear(hidden, layer.gate_up)), layer.down)
        assert update is not None, "a model has layers"
        rows = batch.logit_rows
        if rows.shape[0] == 0:
            return torch.empty((0, self.config.vocab_size))
        hidden = ops.add_rms_norm(update[rows], residual[rows], self.norm, eps)
        return ops.logits(hidden, self.head)
