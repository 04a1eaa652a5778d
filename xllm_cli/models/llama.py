"""The Llama family: pre-norm layers of grouped-query attention and a SwiGLU network.

Mistral and Qwen2 are of it too: they differ in windows and biases, which the config tells.
"""

from __future__ import annotations

import torch

from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.blocks import Attention, GatedNetwork, Norm
from xllm_cli.models.decoder import Decoder
from xllm_cli.models.weights import ModuleWeights


class LlamaLayer:
    """residual += attention(norm(residual)); residual += network(norm(residual))."""

    def __init__(self, weights: ModuleWeights, attention: Attention) -> None:
        self.attention_norm = Norm(weights, "input_layernorm")
        self.attention = attention
        self.network_norm = Norm(weights, "post_attention_layernorm")
        self.network = GatedNetwork(weights, weights.ops.silu_mul)

    def __call__(self, update: torch.Tensor | None, residual: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
        """See decoder.Layer."""
        hidden = self.attention_norm.add(update, residual)
        update = self.attention(hidden, batch, kv)
        hidden = self.network_norm.add(update, residual)
        return self.network(hidden)


class Llama(Decoder):
    """A Llama, Mistral or Qwen2 model."""

    def load_layer(self, weights: ModuleWeights, *, rope: torch.Tensor, window: int | None) -> LlamaLayer:
        """See Decoder."""
        return LlamaLayer(weights, Attention(weights, rope=rope, window=window))
