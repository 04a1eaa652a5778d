"""The supported architectures: from a model folder to its config, from config and weights to a model.

Imports no torch until a model is built, so that the command line may read a config.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from xllm_cli.core import CacheSpec
from xllm_cli.errors import ModelError
from xllm_cli.models import families
from xllm_cli.models.config import Family, ModelConfig, read_decoder, read_end_tokens, read_json

if TYPE_CHECKING:
    import torch

    from xllm_cli.models.batch import Batch, LayerKV
    from xllm_cli.models.kv_layout import TensorFactory
    from xllm_cli.models.ops.base import Ops


class ModelClass(NamedTuple):
    """Where a model lives, imported only when it is built, and what reads its config."""

    module: str
    name: str
    family: Family


MODELS: Mapping[str, ModelClass] = {
    "LlamaForCausalLM": ModelClass("llama", "Llama", families.llama),
    "MistralForCausalLM": ModelClass("llama", "Llama", families.mistral),
    "Qwen2ForCausalLM": ModelClass("llama", "Llama", families.qwen2),
    "Qwen3ForCausalLM": ModelClass("qwen3", "Qwen3", families.qwen3),
    "Gemma3ForCausalLM": ModelClass("gemma3", "Gemma3", families.gemma3),
}


class Model(Protocol):
    """What the worker needs of a model."""

    config: ModelConfig
    weight_bytes: int  # of its weights on the device

    def cache_spec(self, block_size: int, layout: str | None = None) -> CacheSpec:
        """The KV tensors of this model; `layout` defaults to the operators'."""
        ...

    def kv_views(
        self, tensor: TensorFactory, *, block_size: int, num_blocks: int, layout: str | None = None
    ) -> list[LayerKV]:
        """Views of those tensors, one pair a layer. `tensor(index, dtype, shape, strides, offset)` counts elements."""
        ...

    def forward(self, batch: Batch, kv: list[LayerKV]) -> torch.Tensor:
        """Write the batch's KV and return the logits of `batch.logit_rows`, [S, vocab] float32."""
        ...


def load_config(folder: str | Path) -> ModelConfig:
    """Read `config.json` (and the end tokens of `generation_config.json`). ModelError says what is wrong with it."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist")
    raw = read_json(folder / "config.json")
    named = raw.get("architectures") or ["none"]
    supported = [name for name in named if name in MODELS]
    if not supported:
        raise ModelError(f"architecture {', '.join(map(str, named))} is not supported; supported: {', '.join(MODELS)}")
    name = supported[0]
    return read_decoder(raw, name, end_tokens=read_end_tokens(raw, folder), family=MODELS[name].family)


def build_model(config: ModelConfig, ops: Ops, weights: Mapping[str, torch.Tensor], dtype: str = "auto") -> Model:
    """Read and pack the weights tensor by tensor. `dtype`: auto, bfloat16 or float32.

    Raises ModelError naming a tensor that is missing, unexpected or of another shape.
    """
    where = MODELS[config.architecture]
    model = getattr(importlib.import_module(f"xllm_cli.models.{where.module}"), where.name)
    return cast(Model, model(config, ops, weights, config.resolve_dtype(dtype)))
