"""Every architecture against what transformers computes, and against itself along every other path."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint
from model_runs import answers, build, run
from paged import batch_of, poisoned_kv

from xllm_cli.models.ops.cpu import CpuOps
from xllm_cli.models.ops.reference import ReferenceOps
from xllm_cli.models.registry import MODELS, load_config

NAMES = ["llama", "llama_tied", "mistral", "qwen2", "qwen3", "gemma3_text"]
WINDOWED = ["mistral", "gemma3_text"]


def test_every_architecture_is_tested() -> None:
    assert {load_config(tiny_checkpoint(name)).architecture for name in NAMES} == set(MODELS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["interleaved", "per_layer"])
@pytest.mark.parametrize("chunk", [10**6, 16, 1])
def test_float32_logits_are_the_oracles(name: str, layout: str, chunk: int) -> None:
    folder = tiny_checkpoint(name)
    model = build(folder, "float32")
    for ids, expected in answers(folder):
        assert (run(model, ids, chunk=chunk, layout=layout) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_reference_operators_and_older_config_agree(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(tiny_checkpoint(name), folder)
    (folder / "config_v4.json").rename(folder / "config.json")
    for ids, expected in answers(folder):
        assert (run(build(folder, "float32", ReferenceOps()), ids) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_oldest_processor(name: str) -> None:
    folder = tiny_checkpoint(name)
    for ids, expected in answers(folder):
        assert (run(build(folder, "float32", CpuOps("baseline")), ids, chunk=16) - expected).abs().max() <= 1e-4


def bfloat16_errors(name: str) -> tuple[list[float], list[int], bool]:
    """Squared errors of ours and transformers', argmax flips of both; whether ours are where the oracle hesitates."""
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint(name)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    ours, errors, flips, near = build(folder, "bfloat16"), [0.0, 0.0], [0, 0], True
    for ids, expected in answers(folder):
        with torch.no_grad():
            logits = theirs(torch.tensor([ids])).logits[0].float()
        best = expected.topk(2).values
        for i, found in enumerate((run(ours, ids, chunk=16), logits)):
            flipped = found.argmax(-1) != expected.argmax(-1)
            errors[i] += float((found - expected).double().square().sum())
            flips[i] += int(flipped.sum())
            near &= i == 1 or bool((best[:, 0] - best[:, 1])[flipped].lt(0.5).all())
    return errors, flips, near


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_closer_than_transformers(name: str) -> None:
    (ours, theirs), flips, near = bfloat16_errors(name)
    assert (ours / theirs) ** 0.5 <= 0.75 and flips[0] <= flips[1] and near  # activations keep float32


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_and_chunks_change_no_bit(name: str, dtype: str) -> None:
    folder = tiny_checkpoint(name)
    model = build(folder, dtype)
    sequences = [ids for ids, _ in answers(folder)]
    alone = [run(model, ids, block_size=8) for ids in sequences]
    for chunk in (1, 16, 33):
        assert torch.equal(run(model, sequences[2], chunk=chunk), alone[2])
    kv = poisoned_kv(model, 8 * len(sequences), 16, "per_layer")
    rows = [(ids, 0, range(8 * i, 8 * i + -(-len(ids) // 16))) for i, ids in enumerate(sequences)]
    assert torch.equal(model.forward(batch_of(rows, 16), kv), torch.cat(alone))


@pytest.mark.parametrize(("name", "window"), [("mistral", None), ("gemma3_text", 100)])
def test_the_window_matters(name: str, window: int | None, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint(name), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": window}))
    ids, expected = answers(tmp_path)[2]
    off = (run(build(tmp_path, "float32"), ids) - expected).abs().amax(dim=1)
    assert off[:16].max() <= 1e-4 and off[16:].max() > 0.01


@pytest.mark.parametrize("name", WINDOWED)
def test_what_left_every_window_is_not_read(name: str) -> None:
    model = build(tiny_checkpoint(name), "float32")
    ids, layers = list(range(40)), range(model.config.num_layers)
    kv = poisoned_kv(model, 3, 16, "interleaved")
    before = model.forward(batch_of([(ids, 0, [2, 0, 1])], 16), kv)[39]
    for layer in layers:
        if model.config.window_of(layer) is not None:
            kv[layer].k[2] = kv[layer].v[2] = torch.nan  # positions 0 … 15; the last token sees from 24
    assert torch.equal(model.forward(batch_of([(ids[39:], 39, [2, 0, 1])], 16), kv)[0], before)


def save_random(folder: Path, kind: str, **fields: object) -> tuple[list[int], torch.Tensor]:
    """A random model of these sizes into `folder`; 60 tokens and transformers' logits."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=2, max_position_embeddings=128, **fields)
    architecture = {"Gemma3Text": "Gemma3"}.get(kind, kind) + "ForCausalLM"
    model = getattr(transformers, architecture)._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    ids = torch.randint(0, 96, (60,))
    with torch.no_grad():
        return ids.tolist(), model(ids[None]).logits[0]


QWEN_WINDOW = {"use_sliding_window": True, "max_window_layers": 1}
ODD = {
    "gemma-3-270m": ("Gemma3Text", {"heads": (4, 1), "head_dim": 256, "sliding_window": 20, "layer_types": 2}),
    "qwen2.5-0.5b": ("Qwen2", {"heads": (14, 2), "hidden_size": 14 * 64}),
    "qwen2-windowed": ("Qwen2", {"heads": (4, 2), "hidden_size": 64, "sliding_window": 9, **QWEN_WINDOW}),
    "qwen3-0.6b": ("Qwen3", {"heads": (16, 8), "head_dim": 128, "attention_bias": True}),
    "mistral-7b": ("Mistral", {"heads": (4, 1), "head_dim": 128, "sliding_window": 33}),
}


@pytest.mark.parametrize("name", ODD)
def test_sizes_of_real_models(name: str, tmp_path: Path) -> None:
    kind, sizes = ODD[name]
    fields = {"hidden_size": 88, "intermediate_size": 76, "vocab_size": 96, "pad_token_id": 0, **sizes}
    heads, kv_heads = fields.pop("heads")
    if "layer_types" in fields:
        fields["layer_types"] = ["sliding_attention", "full_attention"]
    ids, expected = save_random(tmp_path, kind, num_attention_heads=heads, num_key_value_heads=kv_heads, **fields)
    for chunk in (100, 7):
        found = run(build(tmp_path, "float32"), ids, chunk=chunk, block_size=24)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
