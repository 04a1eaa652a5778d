"""The versions that a bug report needs, read from metadata and version files: nothing is imported for them."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from xllm_cli import __version__

ASCEND_DRIVER = Path("/usr/local/Ascend/driver/version.info")
_CANN_FILES = (
    "*-linux/ascend_toolkit_install.info",
    "share/info/runtime/version.info",
    "runtime/version.info",
    "compiler/version.info",
)


def versions(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """By name, in the order to print; what is absent is left out."""
    found = {
        "xllm": __version__,
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "torch-npu": package_version("torch-npu"),
        "CANN": cann_version(environment),
    }
    return {name: version for name, version in found.items() if version}


def package_version(name: str) -> str:
    """The version of an installed distribution, '' without it."""
    import importlib.metadata  # costs a tenth of what any command takes, and few need it

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cann_version(environment: Mapping[str, str] = os.environ) -> str:
    """The version of Ascend's toolkit at ASCEND_HOME_PATH, '' where the variable or every version file is missing."""
    home = environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME")
    if not home:
        return ""
    candidates = (path for pattern in _CANN_FILES for path in sorted(Path(home).glob(pattern)))
    return next(filter(None, map(version_in, candidates)), "")


def version_in(path: Path) -> str:
    """The value of `Version=` (in any case) in one of Ascend's version files, '' if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"^\s*version\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    return found[1].strip("[]") if found else ""
