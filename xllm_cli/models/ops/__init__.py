"""The operators model files call, one implementation a device."""

from __future__ import annotations

import importlib
from typing import Any, cast

from xllm_cli.errors import DeviceError
from xllm_cli.models.ops.base import Ops

_CLASSES = {"cpu": "CpuOps", "npu": "NpuOps", "reference": "ReferenceOps"}


def open_ops(device: str, **options: Any) -> Ops:
    """The operators of `device` (cpu, npu; reference is plain torch, for tests). DeviceError if there are none.

    `options` are their constructor's: npu takes device_index.
    """
    if device not in _CLASSES:
        raise DeviceError(f"no operators for device {device!r}; there are: {', '.join(_CLASSES)}")
    module = importlib.import_module(f"xllm_cli.models.ops.{device}")
    return cast(Ops, getattr(module, _CLASSES[device])(**options))
