"""Runs the programs of `.venv-clients/` against a server: a clean environment, no network but loopback, a deadline."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPTS = Path(__file__).with_name("clients")
_DROPPED = ("PYTHON", "OPENAI_", "ANTHROPIC_", "LANG", "HF_", "GUIDELLM_")  # would change what a client does


def client_environment(home: Path) -> dict[str, str]:
    """A process environment with `home` for whatever a client writes."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(_DROPPED) and not n.lower().endswith("_proxy")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {**kept, **offline, "HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}


def run_client(home: Path, *command: str | Path, seconds: float = 100, cwd: Path | None = None, **more: str) -> str:
    """What a program prints; it must end well within so many seconds. `more` are environment variables."""
    ended = subprocess.run(
        list(map(str, command)), cwd=cwd or home, env={**client_environment(home), **more}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    return ended.stdout
