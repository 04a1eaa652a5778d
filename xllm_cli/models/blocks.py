"""The parts decoder layers are made of: norms, attention over the paged cache, the gated network."""

from __future__ import annotations

from collections.abc import Callable

import torch

from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.ops.base import Heads
from xllm_cli.models.weights import ModuleWeights


class Norm:
    """RMS norm of the hidden state."""

    def __init__(self, weights: ModuleWeights, name: str) -> None:
        self.ops = weights.ops
        self.eps = weights.config.rms_norm_eps
        self.weight = weights.norm(name, weights.config.hidden_size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] → [T, hidden]."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, update: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """residual += update in place, if there is one; then the norm of residual."""
        if update is None:
            return self(residual)
        return self.ops.add_rms_norm(update, residual, self.weight, self.eps)


class Attention:
    """Grouped-query attention with rotary positions; sees a window of the past, or all of it."""

    def __init__(self, weights: ModuleWeights, *, rope: torch.Tensor, window: int | None) -> None:
        """`rope`: see Ops.rope. `window`: tokens seen, the querying one included."""
        config = weights.config
        self.ops = weights.ops
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self.ops.check_heads(self.heads)
        self.scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.rope = rope
        self.window = window
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"self_attn.q_proj": q_width, "self_attn.k_proj": kv_width, "self_attn.v_proj": kv_width}
        self.qkv = weights.linear(qkv, config.hidden_size, bias=config.qkv_bias)
        self.output = weights.linear({"self_attn.o_proj": config.hidden_size}, q_width, bias=config.output_bias)

    def __call__(self, hidden: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
        """[T, hidden] → [T, hidden]; writes the tokens' keys and values into `kv`."""
        qkv = self.ops.linear(hidden, self.qkv)
        self.normalise(qkv)
        self.ops.rope(qkv, batch.positions, self.rope, self.heads)
        self.ops.write_kv(qkv, kv, batch.slots, self.heads)
        attended = self.ops.attention(qkv, kv, batch, self.heads, scale=self.scale, window=self.window)
        return self.ops.linear(attended, self.output)

    def normalise(self, qkv: torch.Tensor) -> None:
        """What happens to queries and keys before they turn: nothing."""


class NormedAttention(Attention):
    """Attention whose queries and keys are RMS-normalised head by head before they turn."""

    def __init__(self, weights: ModuleWeights, *, rope: torch.Tensor, window: int | None) -> None:
        super().__init__(weights, rope=rope, window=window)
        self.eps = weights.config.rms_norm_eps
        self.q_norm = weights.norm("self_attn.q_norm", weights.config.head_dim)
        self.k_norm = weights.norm("self_attn.k_norm", weights.config.head_dim)

    def normalise(self, qkv: torch.Tensor) -> None:
        """Norms in place."""
        self.ops.head_rms_norm(qkv, self.q_norm, self.k_norm, self.heads, eps=self.eps)


class GatedNetwork:
    """down(activation(gate(x)) · up(x)); `activation` takes gate and up side by side."""

    def __init__(self, weights: ModuleWeights, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        config, inner = weights.config, weights.config.intermediate_size
        self.ops = weights.ops
        self.activation = activation
        both = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        self.gate_up = weights.linear(both, config.hidden_size, bias=config.mlp_bias)
        self.down = weights.linear({"mlp.down_proj": config.hidden_size}, inner, bias=config.mlp_bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] → [T, hidden]."""
        return self.ops.linear(self.activation(self.ops.linear(hidden, self.gate_up)), self.down)
