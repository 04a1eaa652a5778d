"""The table of spellings a server must understand, from the command line to the configuration; and that order and
spelling never matter."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from flag_values import FREE, value_of, words_of
from hypothesis import given
from hypothesis import strategies as st

from xllm_cli.argv import canonical
from xllm_cli.cli import main
from xllm_cli.config import resolve
from xllm_cli.errors import ConfigError
from xllm_cli.flags import FLAGS
from xllm_cli.sources import gather

KV = "enable_vmm_kvcache"
BOTH = ["--enable_vmm_kvcache", "--enable_vmm_weights"]


class Row(NamedTuple):
    """A row of the table: arguments after `xllm serve --model=M`, and what is expected of them.

    `values` are in the configuration, with `warned` on stderr and nothing else; or the exit code is 2 and `said` is.
    """

    number: int
    argv: Sequence[str]
    values: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple's default is never changed
    warned: Sequence[str] = ()
    said: Sequence[str] = ()


TRUTHS = ["true", "TRUE", "1", "T", "t", "yes", "Yes", "y", "on", "ON"]
TABLE = [
    *(Row(1, [f"--{KV}={word}"], {KV: True}) for word in TRUTHS),
    *(Row(1, [f"--{KV}={word}"], {KV: False}) for word in ("false", "0", "F", "no", "off")),
    Row(2, ["--enable-vmm-kvcache=true"], {KV: True}),
    Row(2, ["--enable_vmm-kvcache"], {KV: True}),
    Row(2, ["--model-id=a-b_c"], {"model_id": "a-b_c"}),
    Row(3, [f"--{KV}"], {KV: True}),
    Row(4, [f"--{KV}", "true"], {KV: True}),
    Row(5, [f"--{KV}", "false"], {KV: False}),
    Row(6, [f"--{KV}", "--port", "9000"], {KV: True, "port": 9000}),
    Row(7, [f"--{KV}", "/models/x"], said=["'/models/x'"]),
    Row(8, ["--noenable_vmm_kvcache"], {KV: False}),
    Row(8, ["--no-enable-vmm-kvcache"], {KV: False}),
    Row(8, ["--no_enable_vmm_kvcache"], {KV: False}),
    Row(9, ["--noenable_vmm_kvcache=true"], said=["negated form takes no value"]),
    Row(10, [f"--{KV}=maybe"], said=["must be true or false (also 1/0, t/f, yes/no, y/n, on/off)"]),
    Row(11, [f"--{KV}="], said=[f"--{KV}=''", "must be true or false"]),
    Row(12, ["-port=9000"], {"port": 9000}),
    Row(12, [f"-{KV}=true"], {KV: True}),
    Row(12, ["-p", "9000"], said=["no such flag -p"]),
    Row(13, ["--enable_vmm_kvcahe=true"], said=["did you mean --enable_vmm_kvcache?"]),
    Row(14, ["--gpu_memory_utilization=0.9"], said=["--max_memory_utilization"]),
    Row(14, ["--tensor-parallel-size", "2"], said=["--nnodes", "--tp_size"]),
    Row(14, ["-tp", "2"], said=["--tp_size"]),
    Row(14, ["--served-model-name", "x"], said=["use --model_id"]),
    Row(14, ["--mem-fraction-static=0.8"], said=["--max_memory_utilization"]),
    Row(14, ["--max-model-len", "4096"], said=["--max_cache_size caps memory"]),
    Row(14, ["--no-enable-prefix-caching"], said=["use --enable_prefix_cache"]),
    Row(14, ["--host", "127.0.0.1"], {"host": "127.0.0.1"}),
    Row(15, ["--enable_xtensor=true"], said=BOTH),
    Row(15, ["--enable_kvcache_vmm"], said=["use --enable_vmm_kvcache"]),
    Row(15, ["--enable_xtensor=false"], {"enable_xtensor": False}),
    Row(16, ["--max_mem=0.5"], said=["no such flag --max_mem", "did you mean --max_memory_utilization"]),
    Row(16, ["--mode=x"], said=["no such flag --mode", "did you mean"]),
    Row(17, ["--port", "1", "--port", "2"], {"port": 2}, ["--port is given 2 times ('1', '2')"]),
    *(Row(18, [f"--max_memory_utilization={v}"], said=["a number from 0 to 1"]) for v in ("nan", "inf", "-1", "1.5")),
    Row(19, ["--vmm_memory_reserve_bytes=1073741824"], {"vmm_memory_reserve_bytes": 2**30}, ["C4"]),
    *(Row(19, [f"--max_cache_size={v}"], {"max_cache_size": 2**30}) for v in ("1GiB", "1G", "1024MiB", "1g")),
    Row(19, ["--max_cache_size=1_000"], {"max_cache_size": 1000}),
    Row(19, ["--max_cache_size=9223372036854775808"], said=["from 0 to 9223372036854775807"]),
    Row(20, ["--port=0x10"], said=["--port='0x10'"]),
    Row(20, ["--port=70000"], said=["from 0 to 65535"]),
    Row(20, ["--port=0"], {"port": 0}),
    Row(21, ["--block_size=128.0"], said=["--block_size='128.0'", "an integer"]),
    Row(22, [" ", "--port=1", ""], {"port": 1}),
    Row(23, ["--host 127.0.0.1"], said=["pass as two arguments or with ="]),
    Row(24, ["--", "x"], said=["unexpected argument 'x'"]),
    Row(25, ["--fromenv=port"], said=["not supported"]),
    Row(25, ["--tryfromenv=port"], said=["not supported"]),
    Row(28, ["--v=1", "--logtostderr", "--minloglevel=2"], {"v": 1}, ["--v=1 (command line), --minloglevel=2"]),
    Row(28, ["-v=1"], {"v": 1}, ["no effect here"]),
    Row(28, ["--log_dir=/l"], {"log_dir": "/l"}),
    Row(29, ["--port=9000\r"], said=["'--port=9000\\r'"]),
    Row(30, ["\u2013enable_vmm_kvcache"], said=["looks like a dash but is U+2013"]),
    Row(30, ["\uff0d\uff0dport=1"], said=["looks like a dash but is U+FF0D"]),
]


@pytest.fixture(autouse=True)
def no_flags_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in FLAGS:
        monkeypatch.delenv(f"XLLM_FLAG_{name.upper()}", raising=False)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[object, str, str]:
    """Exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    return ended.value.code, *capsys.readouterr()


def flat(printed: str) -> dict[str, Any]:
    return {name: value for section in json.loads(printed).values() for name, value in section.items()}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.number}-{' '.join(row.argv)[:40]!r}")
def test_the_table(capsys: pytest.CaptureFixture[str], row: Row) -> None:
    code, out, err = run(capsys, "serve", "--model=M", "--print_config", *row.argv)
    assert "Traceback" not in err and all(words in err for words in (*row.warned, *row.said))
    if row.said:
        assert (code, out) == (2, "")
    else:
        assert code == 0 and err.count("warning: ") == len(row.warned)
        assert flat(out).items() >= {"model": "M", **row.values}.items()


def test_rows_that_ask_for_something_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "flags").write_text("--port=7\n")
    assert flat(run(capsys, "serve", "/models/x", "--print_config")[1])["model"] == "/models/x"
    assert flat(run(capsys, "serve", f"--flagfile={tmp_path}/flags", "--print_config")[1])["port"] == 7
    assert run(capsys, "serve", "--flagfile=/none")[0] == 2
    for topic in ("--helpfull", "--help=all"):
        assert "--dit_debug_print" in run(capsys, "serve", topic)[1]
    for topic in ("--helpshort", "--help", "-h"):
        assert 10 < len(run(capsys, "serve", topic)[1].splitlines()) <= 60
    assert "--block_size" in run(capsys, "serve", "--help=KVCacheConfig")[1]
    assert "--vmm_elastic" in run(capsys, "serve", "--help=vmm")[1]
    code, out, _ = run(capsys, "--version")
    assert code == 0 and len(out.splitlines()) == 1 and "torch" in out


def test_the_table_is_complete() -> None:
    elsewhere = {26, 27}  # help and version, above
    assert {row.number for row in TABLE} | elsewhere == set(range(1, 31))


# --- the commands of the specification

WITH_DRAFT = [
    "--draft_model=/models/mtp", "--speculative_algorithm=MTP", "--num_speculative_tokens=3",
    "--enable_vmm_kvcache=true", "--enable_vmm_weights=false", "--enable_task_pipeline=false",
]  # fmt: skip
ELASTIC = [
    "--enable_vmm_kvcache=true", "--vmm_elastic=true", "--max_memory_utilization=0", "--max_cache_size=0",
    "--vmm_memory_reserve_bytes=1073741824",
]  # fmt: skip


@pytest.mark.parametrize(("block", "num_warnings"), [(WITH_DRAFT, 1), (ELASTIC, 0)])
def test_commands_of_the_specification(capsys: pytest.CaptureFixture[str], block: list[str], num_warnings: int) -> None:
    code, out, err = run(capsys, "serve", *block, "--print_config")
    assert code == 0 and err.count("warning: ") == err.count("not supported yet") == num_warnings
    for name, text in (argument[2:].split("=") for argument in block):
        assert flat(out)[name] == FLAGS[name].parse(text)


def test_a_dump_is_there_before_the_server_is(tmp_path: Path) -> None:
    dumped = tmp_path / "made" / "config.json"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = ["--host=127.0.0.1", f"--port={taken.getsockname()[1]}", f"--dump_config_json_file={dumped}"]
        command = [sys.executable, "-m", "xllm_cli.cli", "serve", "/no/model", "--enable_dump_config_json", *where]
        ended = subprocess.run([*command, *ELASTIC], capture_output=True, timeout=60, check=False)
    assert ended.returncode == 3 and flat(dumped.read_text())["vmm_memory_reserve_bytes"] == 2**30


def test_a_dump_that_fails_ends_the_start_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--enable_dump_config_json", "--dump_config_json_file=/dev/null/x.json", "--port=0"]
    code, _, err = run(capsys, "serve", "--model=/none", *flags)
    assert code == 1 and "--dump_config_json_file=/dev/null/x.json cannot be written: " in err


# --- order and spelling never matter

FOUR = ["--port=9000", f"--{KV}", "--max_cache_size=1GiB", "--novmm_elastic"]


def test_order_never_matters() -> None:
    printed = {tuple(sorted(canonical(argv).argv)) for argv in itertools.permutations([*FOUR[:3], "/m"])}
    files = {tuple(sorted(canonical(["--config_json_file", "f", *argv]).argv)) for argv in itertools.permutations(FOUR)}
    assert len(printed) == len(files) == 1


def test_the_place_of_the_file_does_not_matter(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text('{"port": 1, "block_size": 16}')
    args = [f"--config_json_file={tmp_path}/f.json", "--port=2", f"--{KV}", "--print_config=sources"]
    answers = {run(capsys, "serve", *order)[1] for order in itertools.permutations(args)}
    assert len(answers) == 1 and flat(answers.pop())["port"] == {"value": 2, "source": "command line"}


@st.composite
def spelled(draw: st.DrawFn) -> tuple[dict[str, Any], list[str]]:
    """Values of a few flags, and random tokens that mean them."""
    values: dict[str, Any] = {}
    tokens: list[str] = []
    for flag in draw(st.lists(st.sampled_from(FREE), unique_by=lambda flag: flag.name, max_size=6)):
        value = draw(value_of(flag).filter(lambda value: "\r" not in str(value)))
        texts = words_of(flag, value)
        if not texts:
            continue
        values[flag.name] = value
        name = "".join(draw(st.sampled_from("-_")) if letter == "_" else letter for letter in flag.name)
        text, dashes = draw(st.sampled_from(texts)), draw(st.sampled_from(["-", "--"]))
        forms = [[f"{dashes}{name}={text}"]]
        if flag.kind != "str":
            forms += [[dashes + name, text]]
        if flag.kind == "bool":
            forms += [[dashes + name]] if value else [[f"--no{name}"], [f"--no-{name}"], [f"--no_{name}"]]
        tokens += draw(st.sampled_from(forms)) + draw(st.sampled_from([[], [" "], [""]]))
    return values, tokens


@given(spelled())
def test_any_spelling_means_the_same_configuration(example: tuple[dict[str, Any], list[str]]) -> None:
    values, tokens = example
    argv, warnings, errors = canonical(tokens)
    assert not errors and not warnings
    read = gather(dict(arg.removeprefix("--").split("=", 1) for arg in argv), {})
    assert {name: setting.value for name, setting in read.given.items()} == values and not read.errors


JUNK = st.text(max_size=8) | st.sampled_from([f"--{name}" for name in FLAGS] + ["true", "0", "-1", "--", "x=y", "1GiB"])


@given(st.lists(JUNK | st.tuples(JUNK, JUNK).map("=".join), max_size=5))
def test_no_command_line_does_worse_than_a_message(tokens: list[str]) -> None:
    argv = canonical(tokens).argv
    read = gather(dict(arg.removeprefix("--").split("=", 1) for arg in argv if "config_json_file" not in arg), {})
    try:
        resolve(read)
    except ConfigError as error:
        assert str(error)
