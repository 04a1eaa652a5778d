"""The command as a user meets it: streams, exit codes, and what it does not import."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xllm_cli.cli import COMMANDS, main

COMMANDS_FOLDER = Path(main.__code__.co_filename).parent / "commands"
HEAVY = ("torch", "fastapi", "uvicorn", "transformers", "tokenizers", "zmq", "numpy")
ELASTIC = ["--enable_vmm_kvcache=true", "--vmm_elastic=true", "--max_memory_utilization=0", "--max_cache_size=0"]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("XLLM_FLAG_PORT", raising=False)


class Ran:
    """Exit code, stdout and stderr of one command."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *args: str) -> None:
        with pytest.raises(SystemExit) as ended:
            main(args)
        self.code = ended.value.code
        self.out, self.err = capsys.readouterr()
        assert "Traceback" not in self.err


def test_print_config_is_one_json_object_of_typed_values(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "serve", *ELASTIC, "--vmm_memory_reserve_bytes=1GiB", "--port", "9000", "--print_config")
    printed = json.loads(ran.out)
    assert (ran.code, ran.err) == (0, "")
    assert printed["vmm"] == {
        "enable_vmm_kvcache": True,
        "enable_vmm_weights": False,
        "vmm_elastic": True,
        "vmm_memory_reserve_bytes": 2**30,
        "auto_wake": False,
        "auto_sleep": False,
        "sleep_idle_seconds": 0.0,
        "vmm_neighbours_dir": "",
    }
    assert printed["service"]["port"] == 9000 and printed["kv_cache"]["max_memory_utilization"] == 0.0
    assert json.loads(Ran(capsys, "serve", "--print_config").out)["kv_cache"]["max_memory_utilization"] is None


def test_warnings_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "serve", "--vmm_elastic", "--port=1", "--port=2", "--print_config")
    assert ran.code == 0 and json.loads(ran.out)["service"]["port"] == 2
    assert [line.split(":")[0] for line in ran.err.splitlines()] == ["warning", "warning"]


def test_printed_config_is_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed = Ran(capsys, "serve", "/m", *ELASTIC, "--random_seed=-1", "--print_config").out
    (tmp_path / "flags.json").write_text(printed)
    again = Ran(capsys, "serve", f"--config_json_file={tmp_path}/flags.json", "--print_config")
    assert (again.code, again.out, again.err) == (0, printed, "")


def test_sources_are_named_in_a_broken_rule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XLLM_FLAG_ENABLE_VMM_KVCACHE", "1")
    (tmp_path / "f.json").write_text('{"num_speculative_tokens": 2}')
    ran = Ran(capsys, "serve", f"--config_json_file={tmp_path}/f.json", "--enable_disagg_pd", "--print_config")
    assert ran.code == 2 and ran.out == ""
    assert "--enable_vmm_kvcache=true (environment XLLM_FLAG_ENABLE_VMM_KVCACHE)" in ran.err
    assert f"--num_speculative_tokens=2 (file {tmp_path}/f.json)" in ran.err
    assert "--enable_disagg_pd=true (command line)" in ran.err


def test_warnings_are_not_lost_in_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLLM_FLAG_PROT", "1")
    ran = Ran(capsys, "serve", "--max_memory_utilization=0", "--print_config")
    assert ran.code == 2 and "did you mean XLLM_FLAG_PORT?" in ran.err and "R13:" in ran.err


def test_all_that_is_wrong_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "serve", "--enable_vmm_weights=true", "--max_memory_utilization=0", "--num_speculative_tokens=1")
    assert ran.code == 2 and ran.err.startswith("xllm: 4 problems with the configuration\n")
    assert all(words in ran.err for words in ("R3:", "R13:", "--model is missing", "--num_speculative_tokens=1 (c"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["serve", "--enable_vmm_kvcahe=true"], "did you mean --enable_vmm_kvcache?"),
        (["serve", "--enable_vmm_kvcache=maybe"], "true or false (also 1/0, t/f, yes/no, y/n, on/off)"),
        (["serve", "--enable_vmm_kvcache="], "true or false"),
        (["serve", "--port=0x10"], "--port='0x10' (command line): must be an integer from 0 to 65535"),
        (["serve", "--port=70000"], "an integer from 0 to 65535"),
        (["serve", "--block_size=128.0"], "--block_size='128.0'"),
        (["serve", "--max_memory_utilization=nan"], "a number from 0 to 1"),
        (["serve", "--vmm_memory_reserve_bytes=9223372036854775808"], "from 0 to 9223372036854775807"),
        (["serve", "--config_json_file=/none.json"], "--config_json_file=/none.json: No such file"),
        (["serve", "--print_config=maybe"], "one of false, true, sources"),
        (["serve"], "--model is missing"),
        (["srve"], "did you mean `xllm serve`?"),
        (["zzz"], "there are: bench, "),
        (["fetch"], "Missing argument 'NAME'"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], args: list[str], said: str) -> None:
    ran = Ran(capsys, *args)
    assert ran.code == 2 and ran.out == "" and said in ran.err


def test_model_dependent_rules_read_only_config_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"full_attention_interval": 4}')
    ran = Ran(capsys, "serve", str(tmp_path), "--max_tokens_per_chunk_for_prefill=200", "--print_config")
    assert ran.code == 2 and "R16:" in ran.err and "Fix: --max_tokens_per_chunk_for_prefill=128" in ran.err
    assert Ran(capsys, "serve", str(tmp_path), "--max_tokens_per_chunk_for_prefill=128", "--print_config").code == 0


def test_serve_may_be_left_out_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "--port=9", "--print_config")
    assert ran.code == 0 and "running `xllm serve`" in ran.err and json.loads(ran.out)["service"]["port"] == 9


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert "fetch" in Ran(capsys, "--help").out
    assert len(Ran(capsys, "serve", "--help").out.splitlines()) <= 60
    assert "--node_rank" in Ran(capsys, "serve", "--help=all", "--no-such-flag").out
    assert Ran(capsys, "serve", "--helpshort").out == Ran(capsys, "serve", "--help").out
    assert Ran(capsys, "serve", "--helpfull").out == Ran(capsys, "serve", "--help=all").out
    assert "\x1b" not in Ran(capsys, "serve", "--help=all").out + Ran(capsys, "--help").out + Ran(capsys, "zzz").err
    for args in (["--version"], ["version"]):
        assert re.fullmatch(r"xllm \S+, python \S+, torch \S+(, torch-npu \S+)?(, CANN \S+)?\n", Ran(capsys, *args).out)


def test_every_command_is_listed_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    command = re.compile(r"^def command\(| as command$", re.MULTILINE)
    files = {path.stem for path in COMMANDS_FOLDER.glob("*.py") if command.search(path.read_text())}
    assert {*files, "serve"} == set(COMMANDS)
    listed = Ran(capsys, "--help").out
    for name in COMMANDS:
        assert f"  {name} " in listed
        ran = Ran(capsys, name, "--help")
        assert ran.code == 0 and ran.out.startswith("Usage: xllm ")


def test_flags_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "| `--port` | `8010` |" in Ran(capsys, "flags").out
    assert "| R17 |" in Ran(capsys, "flags", "--limits").out
    readme = tmp_path / "README.md"
    readme.write_text("# x\n")
    assert Ran(capsys, "flags", "--write", str(readme)).code == 0
    assert "`--port`" in readme.read_text()


def test_a_failing_command_ends_with_its_message_and_code(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "fetch", "no-such-model")
    assert ran.code in (1, 2) and ran.out == "" and "no-such-model" in ran.err


QUICK = f"""
import sys, time
from xllm_cli.cli import COMMANDS, main
try:
    main(sys.argv[1:])
except SystemExit:
    print([name for name in {HEAVY!r} if name in sys.modules], time.process_time(), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "args",
    [
        ["serve", "--help"], ["serve", "--vmm_elastik"], ["serve", *ELASTIC, "--print_config"], ["--help"], ["zzz"],
        ["--version"], ["completion", "bash"], ["check", "ftp://x"], ["serve", "--helpfull"],
    ],
)  # fmt: skip
def test_nothing_heavy_is_imported_and_it_is_quick(args: list[str]) -> None:
    seconds = []
    for _ in range(3):  # the best of three: the machine may be busy
        command = [sys.executable, "-c", QUICK, *args]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        imported, spent = ran.stderr.splitlines()[-1].rsplit(" ", 1)
        assert imported == "[]"
        seconds.append(float(spent))
        if seconds[-1] < 0.5:
            break
    assert min(seconds) < 0.5


def test_a_reader_that_leaves_early_causes_no_traceback() -> None:
    command = f"{sys.executable} -m xllm_cli.cli serve --help=all | head -c 1"
    ran = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stderr == ""
