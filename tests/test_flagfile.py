"""gflags' flagfiles: read in their place, nested, and refused where they cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from xllm_cli.argv import canonical
from xllm_cli.errors import ConfigError
from xllm_cli.flagfile import expand


def write(folder: Path, text: str | bytes, name: str = "flags") -> str:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return str(folder / name)


def test_a_file_is_read_in_its_place(tmp_path: Path) -> None:
    file = write(tmp_path, "# a comment\n\n// another\n--port=2\n  -vmm_elastic  \n--noenable_prefix_cache\n")
    content = ["--port=2", "-vmm_elastic", "--noenable_prefix_cache"]
    assert expand([f"--flagfile={file}", "--port=3"]) == [*content, "--port=3"]
    argv, warnings, errors = canonical(expand(["--port=1", "-flagfile", file]))
    assert argv == ["--port=2", "--vmm_elastic=true", "--enable_prefix_cache=false"]
    assert len(warnings) == 1 and not errors


def test_files_may_name_others(tmp_path: Path) -> None:
    inner = write(tmp_path, "--port=1", "inner")
    outer = write(tmp_path, f"--flagfile={inner}\n--host=x", "outer")
    assert expand(["a", f"--flagfile={outer},{inner}"]) == ["a", "--port=1", "--host=x", "--port=1"]


def test_after_the_end_of_flags_it_is_a_word() -> None:
    assert expand(["--", "--flagfile=x"]) == ["--", "--flagfile=x"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("xllm\n--port=1", "the line 'xllm' is no flag"),
        (b"\xff", "codec can't decode"),
        ("--flagfile={}", "names itself"),
        ("--flagfile", "--flagfile needs a value"),
    ],
)
def test_bad_files(tmp_path: Path, text: str | bytes | None, said: str) -> None:
    file = str(tmp_path / "flags")
    if text is not None:
        write(tmp_path, text.format(file) if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=said):
        expand([f"--flagfile={file}"])


def test_a_line_of_windows_is_told(tmp_path: Path) -> None:
    errors = canonical(expand([f"--flagfile={write(tmp_path, '--port=1' + chr(13) + chr(10))}"])).errors
    assert len(errors) == 1 and "Windows" in errors[0]
