"""Gemma 3, text: norms before and after attention and network, norm weights kept as w - 1, scaled embeddings, GeGLU.

Most layers see a window and turn by angles of their own.
"""

from __future__ import annotations

import math

import torch

from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.blocks import GatedNetwork, Norm, NormedAttention
from xllm_cli.models.decoder import Decoder
from xllm_cli.models.weights import ModuleWeights


class Gemma3Layer:
    """residual += norm(attention(norm(residual))); residual += norm(network(norm(residual)))."""

    def __init__(self, weights: ModuleWeights, attention: NormedAttention) -> None:
        self.before_attention = Norm(weights, "input_layernorm")
        self.attention = attention
        self.after_attention = Norm(weights, "post_attention_layernorm")
        self.before_network = Norm(weights, "pre_feedforward_layernorm")
        self.network = GatedNetwork(weights, weights.ops.gelu_mul)
        self.after_network = Norm(weights, "post_feedforward_layernorm")

    def __call__(self, update: torch.Tensor | None, residual: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
        """See decoder.Layer."""
        hidden = self.before_attention.add(update, residual)
        update = self.after_attention(self.attention(hidden, batch, kv))
        hidden = self.before_network.add(update, residual)
        return self.after_network(self.network(hidden))


class Gemma3(Decoder):
    """A Gemma 3 text model."""

    norm_offset = 1.0

    def load_layer(self, weights: ModuleWeights, *, rope: torch.Tensor, window: int | None) -> Gemma3Layer:
        """See Decoder."""
        return Gemma3Layer(weights, NormedAttention(weights, rope=rope, window=window))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings times √hidden."""
        return super().embed(token_ids) * math.sqrt(self.config.hidden_size)
