"""What each architecture's `config.json` says beyond the sizes all have: one function a family. Imports no torch.

A family takes the parsed file and returns fields of ModelConfig, which win over the common reading. Missing keys mean
what they mean to transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xllm_cli.errors import ModelError
from xllm_cli.models.config import read_rope


def llama(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Biases are as configured."""
    require_activation(raw, "hidden_act", "silu")
    bias = bool(raw.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bool(raw.get("mlp_bias", False))}


def mistral(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Every layer has the window, if there is one."""
    require_activation(raw, "hidden_act", "silu")
    return {"windows": (read_window(raw),) * int(raw["num_hidden_layers"])}


def qwen2(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Biases on queries, keys and values, always."""
    require_activation(raw, "hidden_act", "silu")
    return {"qkv_bias": True, "windows": qwen_windows(raw)}


def qwen3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Biases are as configured; head_dim does not follow from the hidden size."""
    require_activation(raw, "hidden_act", "silu")
    bias = bool(raw.get("attention_bias", False))
    head_dim = int(raw.get("head_dim") or 128)
    return {"qkv_bias": bias, "output_bias": bias, "head_dim": head_dim, "windows": qwen_windows(raw)}


def gemma3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Windowed and full layers in a pattern, with angles of their own; a scale that does not follow from head_dim."""
    require_activation(raw, "hidden_activation", "gelu_pytorch_tanh")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(name):
            raise ModelError(f"{name} {raw[name]!r} is not supported")
    bias, layers = bool(raw.get("attention_bias", False)), int(raw["num_hidden_layers"])
    pattern = int(raw.get("sliding_window_pattern", 6))
    types = raw.get("layer_types") or ["sliding" if (i + 1) % pattern else "full" for i in range(layers)]
    window = read_window(raw)
    if window is None:
        raise ModelError("sliding_window null is not supported: this model's layers differ by their windows")
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "head_dim": int(raw.get("head_dim") or 256),
        "attention_scale": float(raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        "windows": windows_of_types(types, window),
        "rope": read_rope(raw, theta=1e6),
        "window_rope": read_rope(local_rope(raw), layer_type="sliding_attention"),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def local_rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Gemma's config with the keys of its windowed layers in the place of the common ones: they are never scaled."""
    if raw.get("rope_parameters"):
        return raw
    return {**raw, "rope_theta": raw.get("rope_local_base_freq", 1e4), "rope_scaling": None}


def qwen_windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Qwen's windows are off unless `use_sliding_window`; older files give them to layers from max_window_layers on."""
    layers = int(raw["num_hidden_layers"])
    window = read_window(raw) if raw.get("use_sliding_window", False) else None
    first = int(raw.get("max_window_layers", 28))
    types = raw.get("layer_types") or ["sliding" if i >= first else "full" for i in range(layers)]
    return windows_of_types(types, window)


def windows_of_types(types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer from its type: `sliding_attention` or `full_attention`."""
    kinds = [str(kind).removesuffix("_attention") for kind in types]
    unknown = sorted(set(kinds) - {"sliding", "full"})
    if unknown:
        raise ModelError(f"layer type {unknown[0]!r} is not supported; supported: sliding_attention, full_attention")
    return tuple(window if kind == "sliding" else None for kind in kinds)


def read_window(raw: Mapping[str, Any]) -> int | None:
    """Tokens a windowed layer sees, the querying one included; null: all."""
    window = raw.get("sliding_window", 4096)
    if window is not None and int(window) < 1:
        raise ModelError(f"sliding_window {window!r} cannot be")
    return None if window is None else int(window)


def require_activation(raw: Mapping[str, Any], key: str, only: str) -> None:
    """ModelError unless the network's activation is the one this family is made of."""
    if raw.get(key, only) != only:
        raise ModelError(f"{key} {raw[key]!r} is not supported; supported: {only}")
