"""One llama-architecture GGUF file rewritten as a Hugging Face folder: configuration, tokenizer, bf16 weights.

Owns the two naming schemes and their differences (ggml interleaves the rotary halves of Q and K rows, Hugging Face
keeps them apart). Knows nothing of downloads or caches, and needs no torch: numpy has no bfloat16, so weights are
rounded as integers, and the safetensors header is written here. The output is byte-reproducible.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray

from xllm_cli.errors import ModelError

CONTROL_TOKEN = 3  # gguf's TokenType.CONTROL
BYTES_PER_WEIGHT = 2

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, folder: Path) -> None:
    """Write `source` (a GGUF file of architecture llama with a `smollm` tokenizer) into the existing `folder`.

    Raises ModelError for another architecture, tokenizer or tensor than the tables here know.
    """
    reader = GGUFReader(source)
    values = {name: field.contents() for name, field in reader.fields.items()}
    found = (values.get("general.architecture"), values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre"))
    if found != ("llama", "gpt2", "smollm"):
        raise ModelError(f"{source.name} is {found}; only ('llama', 'gpt2', 'smollm') can be converted")
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    _write_json(folder / "config.json", _model_config(values, tied=tied))
    _write_json(folder / "generation_config.json", _token_ids(values))
    _write_json(folder / "tokenizer.json", _tokenizer(values))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(values))
    _write_json(folder / "special_tokens_map.json", _special_tokens(values))
    _write_weights(reader.tensors, values, folder / "model.safetensors")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# --- configuration -------------------------------------------------------------------------------------------------


def _model_config(values: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    theta = float(values["llama.rope.freq_base"])
    # the file holds eps as float32 (9.99999975e-06); the model was trained with the short decimal
    eps = float(f"{values['llama.attention.layer_norm_rms_epsilon']:.6g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_token_ids(values),
        "hidden_act": "silu",
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": values["llama.attention.head_count"],
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": values["llama.rope.dimension_count"],
        "max_position_embeddings": values["llama.context_length"],
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": values["llama.vocab_size"],
    }


def _token_ids(values: Mapping[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "pad_token_id": values["tokenizer.ggml.padding_token_id"],
    }


# --- tokenizer -----------------------------------------------------------------------------------------------------


def _tokenizer(values: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json of the `smollm` pre-tokenizer: every digit alone, then GPT-2's byte-level pattern."""
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    types: list[int] = values["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [
        {"id": index, "content": token, **flags}
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == CONTROL_TOKEN
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": values["tokenizer.ggml.merges"],
        },
    }


def _special_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {role: tokens[values[f"tokenizer.ggml.{key}_token_id"]] for role, key in roles.items()}


def _tokenizer_config(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **_special_tokens(values),
        "add_bos_token": values["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": values["tokenizer.ggml.add_space_prefix"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": values["llama.context_length"],
        "chat_template": values["tokenizer.chat_template"],
    }


# --- weights -------------------------------------------------------------------------------------------------------


def _write_weights(tensors: list[ReaderTensor], values: Mapping[str, Any], path: Path) -> None:
    """model.safetensors, one tensor in memory at a time: header length (8 bytes, little endian), JSON header, data."""
    heads = {"attn_q": values["llama.attention.head_count"], "attn_k": values["llama.attention.head_count_kv"]}
    named = sorted(((hugging_face_name(tensor.name), tensor) for tensor in tensors), key=itemgetter(0))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in named:
        begin, end = end, end + BYTES_PER_WEIGHT * int(tensor.n_elements)
        shape = [int(size) for size in reversed(tensor.shape)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in named:
            weight: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
            part = tensor.name.split(".")[-2]
            if part in heads:
                weight = split_rotary_halves(weight, heads[part])
            file.write(to_bfloat16(weight).tobytes())


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`. Raises ModelError for a name not known."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    raise ModelError(f"unknown tensor {name} in the GGUF file")


def split_rotary_halves(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo ggml's row order: in each head, pairs (0, half), (1, half+1) … lie side by side. weight [heads·dim, in]."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bfloat16 bits of finite float32 values, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
