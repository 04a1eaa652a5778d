"""What the machine and the checkpoint say before anything is loaded: drivers, and a look at config.json.

Never imports torch and opens no weight file. What cannot be read is unknown, not an error: the rules on flags stand
alone then, and loading reports what is missing.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xllm_cli.flags import FLAGS, Config

_WITH_DRIVER = ("cpu", "npu")

# What config.json says in the words of many families. Media: also models that hear.
_MEDIA_KEYS = ("vision_config", "visual", "mm_vision_tower", "img_processor", "audio_config", "thinker_config")
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
_LINEAR_KINDS = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid")
_LINEAR_KEYS = ("linear_num_value_heads", "linear_attn_config", "mamba_d_state", "mamba_d_ssm", "ssm_state_size",
                "ssm_cfg", "hybrid_override_pattern", "attn_layer_period")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    """`drivers`: devices with a usable VMM driver, of those asked for. `auto`: what --device=auto stands for.

    `backend` and `is_hybrid` come from the checkpoint; None and False where it could not be read.
    """

    drivers: frozenset[str] = frozenset({"cpu"})
    auto: str = "cpu"
    backend: str | None = None
    is_hybrid: bool = False


def look(config: Config) -> Facts:
    """The facts that the rules of this configuration depend on."""
    auto = resolve_device("auto")
    drivers = frozenset(device for device in {auto, config.model.device, "cpu"} if has_driver(device))
    backend, is_hybrid = peek(config.model.model)
    return Facts(drivers, auto, backend, is_hybrid)


def resolve_device(device: str) -> str:
    """The device that `--device` means: auto is the first one that this build supports and that is there."""
    if device != "auto":
        return device
    flag = FLAGS["device"]
    candidates = [name for name in flag.choices if name != "auto" and flag.is_supported(name)]
    return next((name for name in candidates if is_there(name)), candidates[-1])


def has_driver(device: str) -> bool:
    """Whether this build can manage the device's memory on this system. What is missing for it is said at the start."""
    return device in _WITH_DRIVER and sys.platform == "linux"


def is_there(device: str) -> bool:
    """Whether a device can be used: the vendor's library loads and shows one. The cpu always is."""
    if device != "npu":
        return has_driver(device)
    home = os.environ.get("ASCEND_HOME_PATH", "")
    return any(_num_npus(library) > 0 for library in ("libascendcl.so", f"{home}/lib64/libascendcl.so"))


def _num_npus(library: str) -> int:
    """How many devices the vendor's runtime shows; 0 without it."""
    count = ctypes.c_uint32()
    try:
        runtime = ctypes.CDLL(library)
        runtime.aclInit(None)  # refused the second time in a process, which is as good
        return count.value if runtime.aclrtGetDeviceCount(ctypes.byref(count)) == 0 else 0
    except (OSError, AttributeError):
        return 0


def peek(model: str) -> tuple[str | None, bool]:
    """The kind of engine a checkpoint folder needs, and whether it mixes linear with full attention."""
    if not model:
        return None, False
    folder = Path(model)
    try:
        if (folder / "model_index.json").is_file():
            return "dit", False
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None, False
    if not isinstance(config, dict):
        return None, False
    text = config.get("text_config")
    is_hybrid = _has_linear_layers(config) or (isinstance(text, dict) and _has_linear_layers(text))
    return "vlm" if any(config.get(key) not in (None, False) for key in _MEDIA_KEYS) else "llm", is_hybrid


def _has_linear_layers(config: dict[str, Any]) -> bool:
    """By the list of its layers where given, else by the older keys that only models with a linear state have."""
    for key in _LAYER_LISTS:
        if isinstance(config.get(key), list):
            return any(kind in _LINEAR_KINDS for kind in config[key])
    return config.get("full_attention_interval", 1) != 1 or any(key in config for key in _LINEAR_KEYS)
