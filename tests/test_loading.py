"""Checkpoints on disk: single and sharded, lazily read, and refused with the tensor's name and file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint
from safetensors.torch import load_file, save_file

from xllm_cli.errors import ModelError
from xllm_cli.loading import open_checkpoint
from xllm_cli.models.ops.cpu import CpuOps
from xllm_cli.models.registry import build_model, load_config
from xllm_cli.models.weights import WeightReader


def shard(tensors: dict[str, torch.Tensor], folder: Path, count: int = 3) -> None:
    """Write tensors as a sharded checkpoint."""
    names, place = sorted(tensors), {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        save_file({name: tensors[name] for name in names[i::count]}, folder / file)
        place |= dict.fromkeys(names[i::count], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))


def test_sharded_and_single_hold_the_same(tmp_path: Path) -> None:
    tensors = load_file(tiny_checkpoint("llama") / "model.safetensors")
    shard(tensors, tmp_path)
    single, sharded = open_checkpoint(tiny_checkpoint("llama")), open_checkpoint(tmp_path)
    assert set(single) == set(sharded) == set(tensors) and len(sharded) == len(tensors)
    assert all(
        torch.equal(single[name], tensors[name]) and torch.equal(sharded[name], tensors[name]) for name in tensors
    )
    assert sharded.origin("model.norm.weight").startswith(str(tmp_path / "model-0000"))
    kept = sharded["model.norm.weight"]
    sharded.close()
    assert torch.equal(kept, tensors["model.norm.weight"])


def test_tensors_are_read_one_by_one(tmp_path: Path) -> None:
    shard({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}, tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").write_bytes(b"not tensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint["a"].shape == (2,) and checkpoint["c"].shape == (4,)
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors is not a safetensors file"):
        checkpoint["b"]


def test_missing_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no weights: neither model\.safetensors nor"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"found pytorch_model\.bin, which cannot be served"):
        open_checkpoint(tmp_path)
    shard({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path, 2)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names files that are missing: model-00001-of-00002\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="not an index of safetensors files"):
        open_checkpoint(tmp_path)


def test_tensor_that_its_file_does_not_hold(tmp_path: Path) -> None:
    shard({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path, 2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"b"', '"z"'))
    with pytest.raises(ModelError, match=r"tensor z cannot be read from .*model-00002-of-00002\.safetensors"):
        open_checkpoint(tmp_path)["z"]


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_types_are_converted(stored: torch.dtype, wanted: torch.dtype) -> None:
    tensor = torch.tensor([[1.5, -2.25], [0.0, 1024.0]], dtype=stored)
    read = WeightReader({"a": tensor.T}, wanted).read("a", 2, 2)
    assert read.dtype == wanted and read.is_contiguous() and torch.equal(read, tensor.T.to(wanted))


def test_kept_tensors_are_not_the_files_memory(tmp_path: Path) -> None:
    shard({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path, 1)
    checkpoint = open_checkpoint(tmp_path)
    kept = WeightReader(checkpoint, torch.float32).keep("b", 3)
    checkpoint.close()
    assert "model-00001-of-00001" not in Path("/proc/self/maps").read_text() and kept.sum() == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"),
        (
            {"model.norm.weight": torch.ones(63)},
            r"model\.norm\.weight in .*safetensors is \[63\], config\.json says \[64\]",
        ),
        ({"model.layers.3.extra": torch.ones(1)}, r"unexpected tensor model\.layers\.3\.extra in .*\.safetensors"),
    ],
)
def test_tensors_that_do_not_fit_the_config(tmp_path: Path, change: dict[str, torch.Tensor], message: str) -> None:
    tensors = load_file(tiny_checkpoint("llama") / "model.safetensors") | change
    shard({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path)
    config = load_config(tiny_checkpoint("llama"))
    with pytest.raises(ModelError, match=message):
        build_model(config, CpuOps(), open_checkpoint(tmp_path), "float32")


def test_leftovers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    tensors = load_file(tiny_checkpoint("llama_tied") / "model.safetensors")
    tensors["lm_head.weight"] = torch.ones(320, 64)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    shard(tensors, tmp_path)
    model = build_model(load_config(tiny_checkpoint("llama_tied")), CpuOps(), open_checkpoint(tmp_path), "float32")
    assert model.head is model.embedding
