"""The Llama family against what transformers computes, and against itself along every other path."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint
from paged import batch_of, poisoned_kv
from safetensors.torch import load_file

from xllm_cli.loading import open_checkpoint
from xllm_cli.models.llama import Llama
from xllm_cli.models.ops.cpu import CpuOps
from xllm_cli.models.ops.reference import ReferenceOps
from xllm_cli.models.registry import build_model, load_config

NAMES = ["llama", "llama_tied"]


def build(folder: Path, dtype: str, ops: object = None) -> Llama:
    return build_model(load_config(folder), ops or CpuOps(prepacked=[]), open_checkpoint(folder), dtype)


def answers(folder: Path) -> list[tuple[list[int], torch.Tensor]]:
    """(token ids, oracle logits of each) of every prompt with its continuation."""
    facts, tensors = json.loads((folder / "oracle.json").read_text()), load_file(folder / "oracle.safetensors")
    return [(a["prompt"] + a["tokens"][:-1], tensors[f"logits.{i}"]) for i, a in enumerate(facts["answers"])]


def run(
    model: Llama, ids: list[int], *, chunk: int = 10**6, block_size: int = 16, layout: str | None = None
) -> torch.Tensor:
    """Logits of every token, `chunk` tokens a step, in a cache of shuffled blocks that began as NaN."""
    count = -(-len(ids) // block_size)
    blocks = torch.randperm(count + 2, generator=torch.Generator().manual_seed(2))[:count].tolist()
    kv = poisoned_kv(model, count + 2, block_size, layout or model.ops.kv_layout)
    steps = [batch_of([(ids[i : i + chunk], i, blocks)], block_size) for i in range(0, len(ids), chunk)]
    return torch.cat([model.forward(step, kv) for step in steps])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["interleaved", "per_layer"])
@pytest.mark.parametrize("chunk", [10**6, 16, 1])
def test_float32_logits_are_the_oracles(name: str, layout: str, chunk: int) -> None:
    folder = tiny_checkpoint(name)
    model = build(folder, "float32")
    for ids, expected in answers(folder):
        worst = (run(model, ids, chunk=chunk, layout=layout) - expected).abs().max()
        assert worst <= 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_reference_operators_and_older_config_agree(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(tiny_checkpoint(name), folder)
    (folder / "config_v4.json").rename(folder / "config.json")
    for ids, expected in answers(folder):
        assert (run(build(folder, "float32", ReferenceOps()), ids) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("level", ["baseline"])
def test_oldest_processor(level: str) -> None:
    folder = tiny_checkpoint("llama")
    for ids, expected in answers(folder):
        assert (run(build(folder, "float32", CpuOps(level)), ids, chunk=16) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_no_worse_than_transformers(name: str) -> None:
    from transformers import LlamaForCausalLM

    folder = tiny_checkpoint(name)
    theirs, ours = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval(), build(folder, "bfloat16")
    errors, flips = torch.zeros(2, dtype=torch.float64), torch.zeros(2)
    for ids, expected in answers(folder):
        with torch.no_grad():
            logits = theirs(torch.tensor([ids])).logits[0].float()
        best = expected.topk(2).values
        for i, found in enumerate((run(ours, ids, chunk=16), logits)):
            flipped = found.argmax(-1) != expected.argmax(-1)
            errors[i] += (found - expected).double().square().sum()
            flips[i] += flipped.sum()
            assert i == 1 or (best[:, 0] - best[:, 1])[flipped].lt(0.5).all()
    assert errors[0].sqrt() <= 0.75 * errors[1].sqrt() and flips[0] <= flips[1]  # activations keep float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_and_chunks_change_no_bit(dtype: str) -> None:
    folder = tiny_checkpoint("llama")
    model = build(folder, dtype)
    sequences = [ids for ids, _ in answers(folder)]
    alone = [run(model, ids, block_size=8) for ids in sequences]
    for chunk in (1, 16, 33):
        assert torch.equal(run(model, sequences[2], chunk=chunk), alone[2])
    kv = poisoned_kv(model, 8 * len(sequences), 16, "per_layer")
    rows = [(ids, 0, range(8 * i, 8 * i + -(-len(ids) // 16))) for i, ids in enumerate(sequences)]
    assert torch.equal(model.forward(batch_of(rows, 16), kv), torch.cat(alone))


def test_logits_of_the_wanted_rows_only() -> None:
    model = build(tiny_checkpoint("llama_tied"), "float32")
    ids = list(range(20))
    whole, batch, kv = run(model, ids), batch_of([(ids, 0, [1, 0])], 16), poisoned_kv(model, 2, 16, "interleaved")
    batch.logit_rows = torch.tensor([19, 3])
    assert torch.equal(model.forward(batch, kv), whole[[19, 3]])
    batch.logit_rows = torch.tensor([], dtype=torch.int64)
    assert model.forward(batch, kv).shape == (0, 320)


def test_biases_head_dim_and_linear_rope(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    sizes = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6}
    more = {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 50, "attention_bias": True, "mlp_bias": True}
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, **more, rope_parameters=rope)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(0, 50, (40,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(run(build(tmp_path, "float32"), ids), expected, rtol=1e-4, atol=1e-4)


def test_cache_spec_counts_every_byte() -> None:
    model = build(tiny_checkpoint("llama"), "bfloat16")
    token = 2 * 3 * 2 * 16 * 2  # k and v, layers, kv heads, head_dim, bytes
    whole, split = model.cache_spec(16, "interleaved"), model.cache_spec(16, "per_layer")
    assert len(whole.tensors) == 1 and len(split.tensors) == 6
    assert whole.bytes_per_block == split.bytes_per_block == 16 * token
    assert model.cache_spec(16) == whole
    with pytest.raises(ValueError, match="diagonal"):
        model.cache_spec(16, "diagonal")
