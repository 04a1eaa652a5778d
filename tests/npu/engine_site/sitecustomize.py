"""Puts the references of the operators into an engine process: on PYTHONPATH, python imports this module at its start.

The engine is started by the server exactly as ever. When it imports the npu's operators, torch_npu is loaded and its
device open; from then on npu operators run on the emulated device's memory, computed by the cpu.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType

OPERATORS = "xllm_cli.models.ops.npu"


class InstallReferences(importlib.abc.MetaPathFinder):
    """Finds nothing; acts when the operators are looked for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == OPERATORS:
            sys.meta_path.remove(self)
            from npu.dispatch import install

            install()


sys.meta_path.insert(0, InstallReferences())
