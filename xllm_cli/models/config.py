"""What `config.json` says, in one vocabulary for the old (transformers 4) and new (5) key names. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xllm_cli.errors import ModelError

Family = Callable[[Mapping[str, Any]], dict[str, Any]]  # from a parsed config.json to fields of ModelConfig
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions: base frequency and how long contexts stretch it. The last three are llama3's."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's sizes. `dtype` is the checkpoint's own; `max_positions` in tokens.

    windows          tokens each layer sees, the querying one included, None for all; () where every layer sees all
    window_rope      rope of the layers that have a window, if not the others'
    attention_scale  of scores; None: head_dim to the power -1/2
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    tie_word_embeddings: bool = False
    windows: tuple[int | None, ...] = ()
    window_rope: RopeConfig | None = None
    attention_scale: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def window_of(self, layer: int) -> int | None:
        """Tokens that `layer` sees, None for all."""
        return self.windows[layer] if self.windows else None

    def rope_of(self, layer: int) -> RopeConfig:
        """The rotary positions of `layer`."""
        return self.rope if self.window_rope is None or self.window_of(layer) is None else self.window_rope

    def resolve_dtype(self, wanted: str) -> str:
        """The type to compute in: `wanted`, or for "auto" the checkpoint's (float16 becomes bfloat16)."""
        if wanted != "auto":
            return wanted
        return "float32" if self.dtype == "float32" else "bfloat16"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model's folder; ModelError if it is missing or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}: --model must be a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def read_rope(raw: Mapping[str, Any], *, theta: float = 1e4, layer_type: str = "full_attention") -> RopeConfig:
    """Rope from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old); `theta` if neither names the base.

    Where `rope_parameters` has a dictionary for each type of layer, that of `layer_type`.
    """
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    scaling = scaling.get(layer_type, scaling)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    return RopeConfig(
        theta=float(scaling.get("rope_theta", raw.get("rope_theta", theta))),
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_positions=int(scaling.get("original_max_position_embeddings", read_max_positions(raw))),
    )


def read_max_positions(raw: Mapping[str, Any]) -> int:
    """The longest context in tokens."""
    return int(raw.get("max_position_embeddings", 2048))


def read_decoder(
    raw: Mapping[str, Any], architecture: str, *, end_tokens: tuple[int, ...], family: Family
) -> ModelConfig:
    """The sizes every decoder has and what its family adds; ModelError names what is missing or makes no sense."""
    try:
        fields = {**_read_common(raw), **family(raw)}
    except KeyError as error:
        raise ModelError(f"config.json has no {error.args[0]!r}") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"config.json has a value that cannot be: {error}") from None
    config = ModelConfig(architecture=architecture, eos_token_ids=end_tokens, **fields)
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ModelError(f"{config.num_heads} heads over {config.num_kv_heads} kv heads of {config.head_dim} cannot be")
    if len(config.windows) not in (0, config.num_layers):
        raise ModelError(f"config.json types {len(config.windows)} layers of {config.num_layers}")
    return config


def _read_common(raw: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    return {
        "model_type": str(raw.get("model_type", "")),
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(raw["intermediate_size"]),
        "num_layers": int(raw["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": int(raw.get("head_dim") or hidden // heads),
        "rms_norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "rope": read_rope(raw),
        "max_positions": read_max_positions(raw),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        "bos_token_id": raw.get("bos_token_id"),
    }


def read_end_tokens(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """End tokens: generation_config.json's if it names any, else config.json's."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    value = generation.get("eos_token_id")
    value = raw.get("eos_token_id") if value is None else value
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
