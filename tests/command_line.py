"""The `xllm` command on a PATH of its own, for tests that run it as deployment scripts do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """An environment whose PATH begins with `folder`/bin, which holds `xllm`; its runtime folder is private."""
    program = folder / "bin" / "xllm"
    if not program.exists():
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m xllm_cli.cli "$@"\n')
        program.chmod(0o755)
    (folder / "run").mkdir(mode=0o700, exist_ok=True)
    fixed = {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(folder / "run"), "OMP_NUM_THREADS": "1"}
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", **fixed, **more}


def shell(script: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """What bash makes of a script in `folder`, within 100 seconds."""
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment(folder, **more), capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip


def wait_for(path: Path, pattern: str, process: subprocess.Popen[bytes], seconds: float = 60) -> re.Match[str]:
    """The first match in a file that a running process writes."""
    deadline = time.monotonic() + seconds
    while True:
        ended = process.poll() is not None
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if found := re.search(pattern, text, re.MULTILINE):
            return found
        assert not ended and time.monotonic() < deadline, f"no {pattern!r} in:\n{text}"
        time.sleep(0.02)
