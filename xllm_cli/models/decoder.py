"""What all decoders share: an embedding, layers that add to a residual stream, a last norm, a head, and KV a layer.

Knows sizes and weight names. How anything is computed or packed is its operators' business, what a layer does is its
model's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

import torch

from xllm_cli.core import CacheSpec
from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.blocks import Norm
from xllm_cli.models.config import ModelConfig, RopeConfig
from xllm_cli.models.kv_layout import KvLayout, TensorFactory
from xllm_cli.models.ops.base import Ops
from xllm_cli.models.rope import rope_table
from xllm_cli.models.weights import ModuleWeights, WeightReader


class Layer(Protocol):
    """One layer on the residual stream."""

    def __call__(self, update: torch.Tensor | None, residual: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
        """Add `update`, the layer before's, to `residual` in place and return this layer's update; all [T, hidden]."""
        ...


class Decoder(ABC):
    """A decoder on some device's operators."""

    norm_offset = 0.0  # what every norm weight lacks in the checkpoint

    def __init__(self, config: ModelConfig, ops: Ops, weights: Mapping[str, torch.Tensor], dtype: str) -> None:
        self.config = config
        self.ops = ops
        self.dtype: torch.dtype = getattr(torch, dtype)
        ops.activation_dtype(self.dtype)  # refuses a type before any weight is read
        reader = WeightReader(weights, self.dtype)
        self._load(reader)
        widened = self.head.weight.element_size() - self.dtype.itemsize  # some operators keep the head in float32
        self.weight_bytes = reader.num_bytes + widened * self.head.columns * self.head.depth

    @abstractmethod
    def load_layer(self, weights: ModuleWeights, *, rope: torch.Tensor, window: int | None) -> Layer:
        """One layer from its weights, with its table of angles and the window it sees."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The residual stream before the first layer, [T, hidden]."""
        return self.ops.embedding(token_ids, self.embedding)

    def forward(self, batch: Batch, kv: list[LayerKV]) -> torch.Tensor:
        """Write the KV of the batch's T tokens into `kv` and return the logits of `logit_rows`, [S, vocab] float32."""
        batch = self.ops.place(batch)
        residual = self.embed(batch.token_ids)
        update: torch.Tensor | None = None
        for layer, cache in zip(self.layers, kv, strict=True):
            update = layer(update, residual, batch, cache)
        assert update is not None, "a model has layers"
        rows = batch.logit_rows
        if rows.shape[0] == 0:
            return torch.empty((0, self.config.vocab_size))
        return self.ops.logits(self.norm.add(update[rows], residual[rows]), self.head)

    def cache_spec(self, block_size: int, layout: str | None = None) -> CacheSpec:
        """The KV tensors for blocks of `block_size` tokens; `layout` defaults to the operators'."""
        return self._kv_layout(block_size, layout).spec()

    def kv_views(
        self, tensor: TensorFactory, *, block_size: int, num_blocks: int, layout: str | None = None
    ) -> list[LayerKV]:
        """One LayerKV a layer over the tensors of `cache_spec`, each of `num_blocks` blocks."""
        return self._kv_layout(block_size, layout).views(tensor, num_blocks)

    def _kv_layout(self, block_size: int, layout: str | None) -> KvLayout:
        # A layer with a window keeps the KV of the whole context all the same: one block table serves all layers.
        config = self.config
        chosen = self.ops.kv_layout if layout is None else layout
        return KvLayout(config.num_layers, config.num_kv_heads, config.head_dim, self.dtype, block_size, chosen)

    def _load(self, reader: WeightReader) -> None:
        config, ops = self.config, self.ops
        table, numbers = (config.vocab_size, config.hidden_size), range(config.num_layers)
        ropes = {rope: self._rope_table(rope) for rope in {config.rope_of(i) for i in numbers}}
        tied = config.tie_word_embeddings
        self.embedding = ops.pack_embedding(reader.read("model.embed_tokens.weight", *table), is_head=tied)
        self.layers = [
            self.load_layer(
                self._below(f"model.layers.{i}.", reader), rope=ropes[config.rope_of(i)], window=config.window_of(i)
            )
            for i in numbers
        ]
        self.norm = Norm(self._below("model.", reader), "norm")
        self.head = self.embedding if tied else ops.pack_head(reader.read("lm_head.weight", *table))
        reader.finish("rotary_emb.inv_freq", *(["lm_head.weight"] if tied else []))

    def _below(self, prefix: str, reader: WeightReader) -> ModuleWeights:
        return ModuleWeights(reader, self.ops, self.config, prefix=prefix, norm_offset=self.norm_offset)

    def _rope_table(self, rope: RopeConfig) -> torch.Tensor:
        return self.ops.pack_rope(rope_table(rope, self.config.head_dim, self.config.max_positions))
