"""Tiny checkpoints of real architectures with the answers transformers gives on them, built once and kept.

`make_tiny_checkpoints.py` tells what a folder holds. Folders live in the user's cache directory under a digest of that
script and the versions it used, so a change of either builds anew.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

_SCRIPT = Path(__file__).with_name("make_tiny_checkpoints.py")


def tiny_checkpoint(name: str) -> Path:
    """The folder of checkpoint `name`; read it, never write into it. Safe against other processes doing the same."""
    folder = _root() / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            command = [sys.executable, str(_SCRIPT), scratch, "--only", name]
            subprocess.run(command, check=True, timeout=110, stdout=subprocess.DEVNULL)
            try:
                os.rename(Path(scratch) / name, folder)
            except OSError:  # another process was faster
                if not folder.is_dir():
                    raise
    return folder


def _root() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    content = _SCRIPT.read_bytes() + f"{version('torch')} {version('transformers')}".encode()
    return cache / "xllm-tests" / hashlib.sha256(content).hexdigest()[:16]
