"""What load_config makes of a folder, and what it says when it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import tiny_checkpoint

from xllm_cli.errors import ModelError
from xllm_cli.models.config import RopeConfig
from xllm_cli.models.registry import load_config

FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def folder_with(tmp_path: Path, **changes: object) -> Path:
    """None leaves a field out, but for a window, whose null has a meaning."""
    both = {**FIELDS, **changes}
    fields = {name: value for name, value in both.items() if value is not None or name == "sliding_window"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_old_and_new_key_names_say_the_same(name: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(name)
    (tmp_path / "config.json").write_bytes((folder / "config_v4.json").read_bytes())
    (tmp_path / "generation_config.json").write_bytes((folder / "generation_config.json").read_bytes())
    assert load_config(tmp_path) == load_config(folder)
    assert load_config(folder).rope.kind == ("llama3" if name == "llama" else "default")


def test_defaults(tmp_path: Path) -> None:
    config = load_config(folder_with(tmp_path))
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert config.rope == RopeConfig(theta=10000.0, original_max_positions=2048) and config.max_positions == 2048
    assert not config.tie_word_embeddings and config.eos_token_ids == () and config.dtype == "float32"


@pytest.mark.parametrize(
    ("checkpoint", "wanted", "resolved"),
    [
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "bfloat16"),
        ("float32", "auto", "float32"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_dtype(tmp_path: Path, checkpoint: str, wanted: str, resolved: str) -> None:
    assert load_config(folder_with(tmp_path, torch_dtype=checkpoint)).resolve_dtype(wanted) == resolved


def test_end_tokens_of_the_generation_config_win(tmp_path: Path) -> None:
    folder_with(tmp_path, eos_token_id=2)
    assert load_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert load_config(tmp_path).eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MysteryForCausalLM"]}, "MysteryForCausalLM is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None}, "none is not supported"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"vocab_size": "many"}, "cannot be"),
        ({"num_attention_heads": 0}, "cannot be"),
        ({"num_key_value_heads": 3}, "4 heads over 3 kv heads"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"rope_scaling": {"type": "spiral"}}, "'spiral' is not supported; supported: default, linear, llama3"),
    ],
)
def test_refused_configs(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_config(folder_with(tmp_path, **changes))


def test_missing_folder_and_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="absent does not exist"):
        load_config(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="not a JSON object"):
        load_config(tmp_path)


def test_reading_a_config_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from xllm_cli.models.registry import load_config;"
        f"load_config({str(folder_with(tmp_path))!r}); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=Path(__file__).parent.parent)


# --- families -----------------------------------------------------------------------------------------------------

HUB = {  # what folders on the hub say, shortened
    "mistral-7b-v0.1": {"architectures": ["MistralForCausalLM"], "sliding_window": 4096},
    "mistral-7b-v0.3": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"], "max_window_layers": 1, "sliding_window": 64, "use_sliding_window": False
    },
    "qwen2-windowed": {
        "architectures": ["Qwen2ForCausalLM"], "max_window_layers": 1, "sliding_window": 9, "use_sliding_window": True
    },
    "qwen3-0.6b": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "sliding_window": None},
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "sliding_window": 512, "sliding_window_pattern": 3,
        "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "query_pre_attn_scalar": 168,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "gemma3_text"])
def test_old_and_new_key_names_of_other_families(name: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(name)
    for file, to in (("config_v4.json", "config.json"), ("generation_config.json", "generation_config.json")):
        (tmp_path / to).write_bytes((folder / file).read_bytes())
    assert load_config(tmp_path) == load_config(folder)


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("mistral-7b-v0.1", (4096, 4096, 4096)),
        ("mistral-7b-v0.3", (None, None, None)),
        ("qwen2.5-0.5b", (None, None, None)),
        ("qwen2-windowed", (None, 9, 9)),
        ("qwen3-0.6b", (None, None, None)),
        ("gemma-3-1b", (512, 512, None)),
    ],
)
def test_windows(name: str, windows: tuple[int | None, ...], tmp_path: Path) -> None:
    config = load_config(folder_with(tmp_path, **HUB[name]))
    assert config.windows == windows and config.window_of(2) == windows[2]


def test_biases(tmp_path: Path) -> None:
    def biases(name: str, **changes: object) -> tuple[bool, bool, bool]:
        config = load_config(folder_with(tmp_path, **HUB[name], **changes))
        return config.qkv_bias, config.output_bias, config.mlp_bias

    assert biases("qwen2.5-0.5b") == (True, False, False)
    assert biases("qwen3-0.6b") == biases("mistral-7b-v0.1") == (False, False, False)
    assert biases("qwen3-0.6b", attention_bias=True) == (True, True, False)


def test_gemmas_own_fields(tmp_path: Path) -> None:
    config = load_config(folder_with(tmp_path, **HUB["gemma-3-1b"]))
    assert config.head_dim == 256 and config.tie_word_embeddings and config.attention_scale == 168**-0.5
    assert config.rope_of(2) == RopeConfig(theta=1e6, kind="linear", factor=8.0, original_max_positions=2048)
    assert config.rope_of(0) == RopeConfig(theta=1e4, original_max_positions=2048)
    (tmp_path / "config.json").write_text(json.dumps({**FIELDS, "architectures": ["Gemma3ForCausalLM"]}))
    config = load_config(tmp_path)
    assert config.windows == (4096,) * 3 and config.attention_scale == 1 / 16 and config.rope.theta == 1e6


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma-3-1b", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
        ("gemma-3-1b", {"hidden_activation": "silu"}, "supported: gelu_pytorch_tanh"),
        ("gemma-3-1b", {"layer_types": ["sliding_attention"]}, "types 1 layers of 3"),
        ("gemma-3-1b", {"layer_types": ["chunked_attention"] * 3}, "'chunked' is not supported"),
        ("mistral-7b-v0.1", {"sliding_window": 0}, "sliding_window 0 cannot be"),
        ("qwen2-windowed", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ("qwen3-0.6b", {"num_hidden_layers": None}, "no 'num_hidden_layers'"),
    ],
)
def test_refused_families(name: str, changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load_config(folder_with(tmp_path, **{**HUB[name], **changes}))
