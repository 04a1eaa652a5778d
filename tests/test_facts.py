"""What config.json and the machine say; what cannot be read is unknown."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from xllm_cli.facts import Facts, has_driver, look, resolve_device
from xllm_cli.flags import Config


def look_at(folder: Path) -> Facts:
    return look(Config.model_validate({"model": {"model": str(folder)}}))


@pytest.mark.parametrize(
    ("content", "backend", "is_hybrid"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "llm", False),
        ({"layer_types": ["linear_attention", "full_attention"]}, "llm", True),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "llm", False),
        ({"full_attention_interval": 4}, "llm", True),
        ({"full_attention_interval": 1}, "llm", False),
        ({"linear_num_value_heads": 4}, "llm", True),
        ({"layer_types": ["full_attention"], "linear_num_value_heads": 4}, "llm", False),
        ({"vision_config": {}, "text_config": {"layer_types": ["linear_attention"]}}, "vlm", True),
        ({"vision_config": {}, "text_config": {}}, "vlm", False),
        ([], None, False),
        ({"visual": {"depth": 32}}, "vlm", False),
        ({"audio_config": None, "vision_config": False}, "llm", False),
        ({"layers_block_type": ["mamba", "attention"]}, "llm", True),
        ({"layers_block_type": ["attention"]}, "llm", False),
        ({"block_types": ["recurrent", "recurrent", "attention"]}, "llm", True),
        ({"layer_types": ["conv", "full_attention"]}, "llm", True),
        ({"linear_attn_config": {"kda_layers": [1]}}, "llm", True),
        ({"layer_types": "linear_attention"}, "llm", False),
    ],
)
def test_config_json(tmp_path: Path, content: Any, backend: str | None, is_hybrid: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    facts = look_at(tmp_path)
    assert (facts.backend, facts.is_hybrid) == (backend, is_hybrid)


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff", b"[" * 100_000])
def test_unreadable_config_json_is_unknown(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert look_at(tmp_path).backend is None


def test_a_diffusion_folder(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    assert look_at(tmp_path).backend == "dit"


def test_without_a_model_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"full_attention_interval": 4}')
    monkeypatch.chdir(tmp_path)
    assert look(Config()) == Facts(drivers=look(Config()).drivers)


def test_devices() -> None:
    assert resolve_device("auto") == "cpu" and resolve_device("npu") == "npu"
    assert has_driver("cpu") == (sys.platform == "linux") and not has_driver("tpu")
    assert "cpu" in look(Config()).drivers
