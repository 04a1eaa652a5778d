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
    fields = {name: value for name, value in {**FIELDS, **changes}.items() if value is not None}
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
