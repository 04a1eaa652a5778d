"""Building models from folders and running them over paged caches, and the answers tiny checkpoints carry."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from paged import batch_of, poisoned_kv
from safetensors.torch import load_file

from xllm_cli.loading import open_checkpoint
from xllm_cli.models.decoder import Decoder
from xllm_cli.models.ops.base import Ops
from xllm_cli.models.ops.cpu import CpuOps
from xllm_cli.models.registry import build_model, load_config


def build(folder: Path, dtype: str, ops: Ops | None = None) -> Decoder:
    """The model in `folder`, by default on the cpu's native operators."""
    return build_model(load_config(folder), ops or CpuOps(prepacked=[]), open_checkpoint(folder), dtype)


def answers(folder: Path) -> list[tuple[list[int], torch.Tensor]]:
    """(token ids, oracle logits of each) of every prompt with its continuation."""
    facts, tensors = json.loads((folder / "oracle.json").read_text()), load_file(folder / "oracle.safetensors")
    return [(a["prompt"] + a["tokens"][:-1], tensors[f"logits.{i}"]) for i, a in enumerate(facts["answers"])]


def run(
    model: Decoder, ids: list[int], *, chunk: int = 10**6, block_size: int = 16, layout: str | None = None
) -> torch.Tensor:
    """Logits of every token, `chunk` tokens a step, in a cache of shuffled blocks that began as NaN."""
    count = -(-len(ids) // block_size)
    blocks = torch.randperm(count + 2, generator=torch.Generator().manual_seed(2))[:count].tolist()
    kv = poisoned_kv(model, count + 2, block_size, layout or model.ops.kv_layout)
    steps = [batch_of([(ids[i : i + chunk], i, blocks)], block_size) for i in range(0, len(ids), chunk)]
    return torch.cat([model.forward(step, kv) for step in steps])
