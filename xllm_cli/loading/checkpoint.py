"""A folder's safetensors files as one mapping from name to tensor, each read when asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from xllm_cli.errors import ModelError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class _File(Protocol):
    """An open safetensors file."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


class Checkpoint(Mapping[str, torch.Tensor]):
    """Reads a tensor at each access and keeps none; files stay open until `close`."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """`files`: where each tensor is."""
        self._files = files
        self._open: dict[Path, _File] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor, backed by the mapped file. KeyError if unknown, ModelError if its file does not hold it."""
        path = self._files[name]
        try:
            return self._handle(path).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"tensor {name} cannot be read from {path}: {error}") from None

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""
        return sum(path.stat().st_size for path in set(self._files.values()))

    def origin(self, name: str) -> str:
        """The file of a tensor, for messages."""
        return str(self._files[name])

    def close(self) -> None:
        """Forget the open files; tensors already handed out stay valid."""
        self._open.clear()

    def _handle(self, path: Path) -> _File:
        if path not in self._open:
            self._open[path] = _open_file(path)
        return self._open[path]


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """The safetensors checkpoint in `folder`, single or sharded. ModelError if there is none or it is broken."""
    folder = Path(folder)
    index = folder / _INDEX
    if index.is_file():
        return Checkpoint(_read_index(index))
    single = folder / _SINGLE
    if not single.is_file():
        others = sorted(path.name for pattern in ("*.bin", "*.gguf") for path in folder.glob(pattern))
        found = f" (found {', '.join(others[:3])}, which cannot be served)" if others else ""
        raise ModelError(f"{folder} holds no weights: neither {_SINGLE} nor {_INDEX}{found}")
    return Checkpoint({name: single for name in _open_file(single).keys()})  # noqa: SIM118 - no mapping


def _read_index(index: Path) -> dict[str, Path]:
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): index.parent / shard for name, shard in shards.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of safetensors files: {error!r}") from None
    missing = sorted({path.name for path in files.values() if not path.is_file()})
    if missing:
        raise ModelError(f"{index} names files that are missing: {', '.join(missing)}")
    return files


def _open_file(path: Path) -> _File:
    try:
        file: _File = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is not a safetensors file: {error}") from None
    return file
