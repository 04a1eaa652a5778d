"""Versions from metadata and from the files that Ascend's installers write."""

from __future__ import annotations

from pathlib import Path

import pytest

from xllm_cli.commands.version import line
from xllm_cli.versions import cann_version, package_version, version_in, versions


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("x86_64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.5.0\nos=linux\n"),
        ("share/info/runtime/version.info", "Version=8.5.0\ntimestamp=1\n"),
        ("compiler/version.info", "# of the compiler\n  Version = [8.5.0]\n"),
    ],
)
def test_cann_is_found_in_the_file_of_every_age(tmp_path: Path, path: str, text: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert cann_version({"ASCEND_HOME_PATH": str(tmp_path)}) == "8.5.0"
    assert cann_version({"ASCEND_HOME_PATH": "", "ASCEND_TOOLKIT_HOME": str(tmp_path)}) == "8.5.0"
    assert list(versions({"ASCEND_HOME_PATH": str(tmp_path)}).items())[-1] == ("CANN", "8.5.0")


def test_what_is_absent_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    (tmp_path / "version.info").write_bytes(b"\xff nothing here")
    assert (
        version_in(tmp_path / "version.info") == version_in(tmp_path / "none") == package_version("no-such-thing") == ""
    )
    assert "CANN" not in versions() and versions()["torch"] == package_version("torch")
    assert line().startswith("xllm ") and "\n" not in line()
