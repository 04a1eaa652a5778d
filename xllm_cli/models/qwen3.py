"""Qwen3, dense: Llama's layers, with a norm on every query and key head."""

from __future__ import annotations

import torch

from xllm_cli.models.blocks import NormedAttention
from xllm_cli.models.decoder import Decoder
from xllm_cli.models.llama import LlamaLayer
from xllm_cli.models.weights import ModuleWeights


class Qwen3(Decoder):
    """A dense Qwen3 model."""

    def load_layer(self, weights: ModuleWeights, *, rope: torch.Tensor, window: int | None) -> LlamaLayer:
        """See Decoder."""
        return LlamaLayer(weights, NormedAttention(weights, rope=rope, window=window))
