"""Tells a step that ran out of execution memory from one that is broken, and how much memory it was refused.

Owns what allocators say when they have nothing left: torch's on cpu, cuda and npu, and numpy's. Knows no device.
"""

from __future__ import annotations

import re

import torch

UNKNOWN_BYTES = 64 << 20  # taken for a refusal that names no size
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "pib": 1 << 50, "eib": 1 << 60}
# 207001 is what the Ascend runtime calls a failed allocation
_SAYS_SO = re.compile(r"out of memory|(?:can't|cannot|unable to) allocate|not enough memory|bad_alloc|\b207001\b", re.I)
_SIZE = re.compile(r"allocate (\d+(?:\.\d+)?) ?(bytes|[KMGTPE]iB)", re.I)


def bytes_refused(error: BaseException) -> int | None:
    """The bytes that were asked for in vain; None if `error` is about something else than memory."""
    text = str(error)
    is_about_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if not is_about_memory and not (isinstance(error, RuntimeError) and _SAYS_SO.search(text)):
        return None
    size = _SIZE.search(text)
    return round(float(size[1]) * _UNITS[size[2].lower()]) if size else UNKNOWN_BYTES
