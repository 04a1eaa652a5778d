"""Starts that end before they serve: exit codes, the cause on the last line, nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scripted_server import ROOT, write_model

from xllm_cli.flags import Config
from xllm_cli.server.listen import listen
from xllm_cli.server.run import run

SCRIPTED = (sys.executable, str(ROOT / "tests" / "scripted_engine.py"))


def test_the_api_process_imports_neither_torch_nor_the_engine() -> None:
    program = (
        "import sys, xllm_cli.server.run, xllm_cli.server.service;"
        "print([n for n in sys.modules if n == 'torch' or n.startswith(('xllm_cli.engine', 'xllm_cli.worker'))])"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.stdout.strip() == "[]", answer.stderr


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


def config(model: Path, port: int = 0) -> Config:
    return Config.model_validate({"service": {"host": "127.0.0.1", "port": port}, "model": {"model": str(model)}})


def test_a_taken_port_ends_with_3_before_the_engine_starts(
    tmp_path: Path, runtime: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with listen("127.0.0.1", 0) as holder:
        assert run(config(tmp_path, holder.getsockname()[1]), ("/no/such/program",)) == 3
    assert "in use" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("host", "key", "warns"), [("", "", True), ("", "key", False), ("127.0.0.1", "", False)])
def test_an_open_server_is_warned_of(
    tmp_path: Path, runtime: Path, caplog: pytest.LogCaptureFixture, host: str, key: str, warns: bool
) -> None:
    flags = {"service": {"host": host, "port": 0}, "security": {"api_key": key}, "model": {"model": str(tmp_path)}}
    run(Config.model_validate(flags), (sys.executable, "-c", "raise SystemExit(1)"))
    assert ("without an API key" in caplog.text) == warns


def test_wrong_security_flags_end_with_2_before_anything_starts(tmp_path: Path, runtime: Path) -> None:
    for flags in ({"api_key_file": "/nonexistent"}, {"ssl_keyfile": "k"}, {"allowed_origins": "a.example"}):
        wrong = Config.model_validate({"security": flags, "service": {"port": 0}})
        assert run(wrong, ("/no/such/program",)) == 2
    (tmp_path / "pid").write_text("notes")
    assert run(Config.model_validate({"service": {"port": 0, "pid_file": str(tmp_path / "pid")}}), ("/no",)) == 2


def test_an_engine_that_gives_up_decides_the_code(
    tmp_path: Path, runtime: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(config(write_model(tmp_path / "m")), (*SCRIPTED, "--fatal", "4")) == 4
    assert capfd.readouterr().err.splitlines()[-1] == "error: the model needs 9 bytes and 8 are free"
    assert list(runtime.iterdir()) == []


def test_an_engine_that_ends_without_a_word_is_reported(
    tmp_path: Path, runtime: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ends = (sys.executable, "-c", "raise SystemExit(1)")
    assert run(config(write_model(tmp_path / "m")), ends) == 1
    assert "the engine ended with status 1" in capfd.readouterr().err.splitlines()[-1]
    killed = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert run(config(tmp_path / "m"), killed) == 1
    assert "ended by SIGKILL" in capfd.readouterr().err.splitlines()[-1]


def test_a_missing_tokenizer_ends_with_1(tmp_path: Path, runtime: Path, capfd: pytest.CaptureFixture[str]) -> None:
    waits = (sys.executable, "-c", "import time; time.sleep(60)")
    assert run(config(tmp_path), waits) == 1
    assert "no tokenizer.json" in capfd.readouterr().err.splitlines()[-1]
    assert list(runtime.iterdir()) == []


def test_a_model_folder_that_is_not_there_is_named(
    tmp_path: Path, runtime: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "nowhere"
    assert run(config(missing)) == 1
    assert f"{missing} does not exist" in capfd.readouterr().err.splitlines()[-1]
