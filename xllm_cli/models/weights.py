"""Reading a checkpoint's tensors by name: shape checked, type converted, none forgotten. Knows no file format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from xllm_cli.errors import ModelError
from xllm_cli.models.config import ModelConfig
from xllm_cli.models.ops.base import Linear, Ops


class WeightReader:
    """Hands out the tensors of a mapping and remembers which were asked for."""

    def __init__(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._weights = weights
        self.dtype = dtype
        self.num_bytes = 0  # of all tensors handed out so far
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """Matrix `name`, contiguous, in the reader's type; to be packed and dropped, for it may be the file's memory.

        ModelError if it is missing or not of `shape`.
        """
        return self._count(self._find(name, shape).to(self.dtype).contiguous())

    def keep(self, name: str, width: int) -> torch.Tensor:
        """Vector `name` in float32, for a norm or a bias: a copy, so that it does not hold the whole file in memory."""
        return self._count(self._find(name, (width,)).to(torch.float32, copy=True))

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_bytes += tensor.nbytes
        return tensor

    def _find(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._weights:
            raise ModelError(f"the checkpoint has no tensor {name}")
        tensor = self._weights[name]
        if tuple(tensor.shape) != shape:
            found = f"tensor {name}{self._where(name)} is {list(tensor.shape)}"
            raise ModelError(f"{found}, config.json says {list(shape)}")
        self._read.add(name)
        return tensor

    def finish(self, *ignored: str) -> None:
        """ModelError if the checkpoint holds a tensor nobody read, unless its name ends with one of `ignored`."""
        left = [name for name in self._weights if name not in self._read and not name.endswith(ignored)]
        if left:
            raise ModelError(f"unexpected tensor {left[0]}{self._where(left[0])} ({len(left)} unexpected in all)")

    def _where(self, name: str) -> str:
        origin = getattr(self._weights, "origin", None)
        return f" in {cast(str, origin(name))}" if origin is not None else ""


class ModuleWeights:
    """The weights of one part of a model, by their names below `prefix`; linears come packed for their operators."""

    def __init__(self, reader: WeightReader, ops: Ops, config: ModelConfig, *, prefix: str, norm_offset: float) -> None:
        """`norm_offset` is added to every norm weight."""
        self.ops = ops
        self.config = config
        self._reader = reader
        self._prefix = prefix
        self._norm_offset = norm_offset

    def norm(self, name: str, width: int) -> torch.Tensor:
        """The weight of a norm, [width], packed for its operators."""
        weight = self._reader.keep(f"{self._prefix}{name}.weight", width) + self._norm_offset
        return self.ops.pack_norm(weight, self._reader.dtype)

    def linear(self, names: Mapping[str, int], depth: int, *, bias: bool) -> Linear:
        """One Linear, the named ones (name → rows) side by side; each is read, packed and dropped."""
        parts = (self._reader.read(f"{self._prefix}{name}.weight", rows, depth) for name, rows in names.items())
        biases = [self._reader.keep(f"{self._prefix}{name}.bias", rows) for name, rows in names.items() if bias]
        return self.ops.pack_linear(parts, sum(names.values()), depth, bias=torch.cat(biases) if biases else None)
