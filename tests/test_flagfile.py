"""gflags' flagfiles: read in their place, nested, and refused where they cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xllm_cli.argv import canonical
from xllm_cli.cli import main
from xllm_cli.errors import ConfigError
from xllm_cli.flagfile import expand as read_tokens


def expand(tokens: list[str]) -> list[str]:
    return [token.text for token in read_tokens(tokens)]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[object, str, str]:
    """Exit status, stdout and stderr of `xllm`."""
    with pytest.raises(SystemExit) as end:
        main(args)
    return end.value.code, *capsys.readouterr()


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
        ("--flagfile", "--flagfile in .*/flags needs a value"),
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


def test_what_is_wrong_with_a_line_names_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inner = write(tmp_path, "--noport\n--prot=1\n--port=1", "inner")
    outer = write(tmp_path, f"--flagfile={inner}\n--hots=x", "outer")
    code, _, err = run(capsys, "serve", "--model=/m", f"--flagfile={outer}", "--blokc_size=1")
    said = [line.removeprefix("  - ") for line in err.splitlines()[1:]]
    files = [line.partition(": ")[0] if line.startswith("flagfile ") else "" for line in said]
    assert (code, files) == (2, [f"flagfile {inner}"] * 2 + [f"flagfile {outer}", ""]), err


def test_a_value_from_a_file_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "--port=x\n--block_size=0\n--host=a")
    code, _, err = run(capsys, "serve", "--model=/m", f"--flagfile={file}", "--block_size=none")
    assert code == 2 and f"--port='x' (flagfile {file})" in err and "--block_size='none' (command line)" in err
    file = write(tmp_path, "--port=1\n--host=a")
    code, out, _ = run(capsys, "serve", "--model=/m", "--host=b", f"--flagfile={file}", "--print_config=sources")
    flags = {name: each for section in json.loads(out).values() for name, each in section.items()}
    assert code == 0 and flags["port"]["source"] == flags["host"]["source"] == f"flagfile {file}"
