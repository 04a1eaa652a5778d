"""A random model with little arithmetic and much KV, so that memory, not the processor, is what a benchmark meets.

Writes a Llama checkpoint and a byte tokenizer; its answers mean nothing, and differ from nobody's.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Array = npt.NDArray[np.float32]
HIDDEN = 32
HEADS = 32
HEAD_DIM = 256
NETWORK = 32
LAYERS = 4
VOCABULARY = 320
CONTEXT = 8192
BYTES_PER_TOKEN = LAYERS * 2 * HEADS * HEAD_DIM * 2  # of KV, in bfloat16


def make_wide_model(folder: Path) -> Path:
    """Write the checkpoint into `folder`, which is made where it is missing; returns it. The same bytes every time."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(), indent=1))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "head_dim": HEAD_DIM,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": LAYERS,
        "intermediate_size": NETWORK, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "bos_token_id": None, "eos_token_id": VOCABULARY - 1,
    }  # fmt: skip


def _tensors() -> dict[str, Array]:
    draw = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Array:
        return draw.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)

    norm = np.ones(HIDDEN, np.float32)
    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": norm}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors[f"{prefix}self_attn.{name}.weight"] = matrix(HEADS * HEAD_DIM, HIDDEN)
        tensors[f"{prefix}self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        tensors[f"{prefix}mlp.gate_proj.weight"] = matrix(NETWORK, HIDDEN)
        tensors[f"{prefix}mlp.up_proj.weight"] = matrix(NETWORK, HIDDEN)
        tensors[f"{prefix}mlp.down_proj.weight"] = matrix(HIDDEN, NETWORK)
        tensors[f"{prefix}input_layernorm.weight"] = norm
        tensors[f"{prefix}post_attention_layernorm.weight"] = norm
    return tensors


def _tokenizer() -> Tokenizer:
    """Bytes, and tokens that no text becomes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    filler = [f"<{number}>" for number in range(VOCABULARY - len(letters) - 1)]
    vocabulary = {token: number for number, token in enumerate([*letters, *filler, "<end>"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made
