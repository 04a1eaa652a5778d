"""A random Llama with little arithmetic and broad KV: a page of 2 MiB holds four blocks of one tensor.

Its answers mean nothing; what matters is that they are the same wherever they are computed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from checkpoints import tiny_checkpoint
from safetensors.torch import save_file

HIDDEN, HEADS, HEAD_DIM, LAYERS, VOCABULARY = 64, 8, 128, 2, 320
NUM_TENSORS = 2 * LAYERS
BLOCKS_PER_PAGE = (2 << 20) // (128 * HEADS * HEAD_DIM * 4)


def write_small_model(folder: Path, seed: int = 5) -> Path:
    """Write the checkpoint, float32, into `folder`, and return it. Another `seed` gives other weights."""
    tiny = tiny_checkpoint("llama_tied")
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / name, folder / name)
    config = json.loads((tiny / "config.json").read_text())
    config |= {
        "hidden_size": HIDDEN, "head_dim": HEAD_DIM, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "num_hidden_layers": LAYERS, "intermediate_size": HIDDEN, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) / columns**0.5

    weights = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    weights["lm_head.weight"] = 3 * matrix(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for side in "qkv":
            weights[f"{prefix}self_attn.{side}_proj.weight"] = matrix(HEADS * HEAD_DIM, HIDDEN)
        weights[f"{prefix}self_attn.o_proj.weight"] = 4 * matrix(HIDDEN, HEADS * HEAD_DIM)  # what was said matters
        for side in ("gate", "up", "down"):
            weights[f"{prefix}mlp.{side}_proj.weight"] = matrix(HIDDEN, HIDDEN)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN)
    return weights
