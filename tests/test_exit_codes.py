"""What a whole `xllm` process ends with, and that the cause is the last line it says. 75 and 130: test_service.py and
test_server.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from checkpoints import tiny_checkpoint
from command_line import environment, wait_for
from scripted_server import open_stream, script, serving, wait_until, write_model


def ended(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit status and the last line on stderr of `xllm serve`."""
    ran = subprocess.run(
        ["xllm", "serve", "--host=127.0.0.1", *arguments], env=environment(folder), cwd=folder, capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "Traceback" not in ran.stderr
    return ran.returncode, (ran.stderr.splitlines() or [""])[-1]


@pytest.mark.parametrize("flag", ["--help", "--help=all", "--helpfull", "--helpshort", "--print_config"])
def test_0_when_nothing_was_to_be_served(tmp_path: Path, flag: str) -> None:
    assert ended(tmp_path, flag) == (0, "")


def test_1_for_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    code, line = ended(tmp_path, f"--model={model}", "--port=0")
    assert code == 1 and line.startswith("error: ") and "Scripted" in line


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_cause_is_last_in_the_log_file_too(tmp_path: Path, log_format: str) -> None:
    flags = [f"--model={tmp_path}", "--port=0", "--log_dir=log", f"--log_format={log_format}"]
    code, line = ended(tmp_path, *flags)
    last = (tmp_path / "log" / "node_0.log").read_text().splitlines()[-1]
    assert code == 1 and "no tokenizer.json" in line and (last == line or json.loads(last)["message"] in line)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prot=1", "--model=m"], "did you mean --port?"),
        (["--config_json_file=broken.json", "--model=m"], "broken.json: line 1 column 2"),
        (["--model=m", "--max_memory_utilization=0"], "R13"),
        (["--model=m", "--log_dir=broken.json", "--port=0"], "--log_dir=broken.json"),
        (["--model=m", "--api_key_file=none", "--port=0"], "--api_key_file=none"),
    ],
)
def test_2_for_what_was_written_wrong(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "broken.json").write_text("{]")
    code, line = ended(tmp_path, *arguments)
    assert code == 2 and said in line


def test_3_names_who_holds_the_port_and_opens_no_model(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, line = ended(tmp_path, "--model=/no/model", f"--port={port}")
    assert code == 3 and "/no/model" not in line
    assert f"cannot listen on 127.0.0.1:{port}: it is in use by process {os.getpid()}" in line


@pytest.mark.server
def test_4_when_not_one_block_fits(tmp_path: Path) -> None:
    code, line = ended(tmp_path, f"--model={tiny_checkpoint('llama')}", "--port=0", "--host_memory_bytes=1MiB")
    assert code == 4 and line.startswith("error: ") and "bytes" in line


@pytest.mark.server
def test_143_when_a_second_sigterm_does_not_wait(tmp_path: Path) -> None:
    with serving(tmp_path, write_model(tmp_path / "model")) as server:
        stream = open_stream(server.wait_ready(), script(endless=True, delay=0.05), stream=True)
        wait_until(lambda: server.gauge("vllm:num_requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("stopping: 1 requests are open")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 143
        stream.close()


@pytest.mark.server
def test_0_at_once_for_a_stop_during_the_load(tmp_path: Path) -> None:
    """The engine is deep in the import of torch, which no signal interrupts; nothing of the start is left."""
    command = ["xllm", "serve", str(tiny_checkpoint("llama")), "--host=127.0.0.1", "--port=0", "--pid_file=pid"]
    with (tmp_path / "err").open("wb") as err:
        process = subprocess.Popen(command, env=environment(tmp_path), stderr=err, cwd=tmp_path)
    try:
        wait_for(tmp_path / "err", "loading: importing torch", process)
        (engine,) = psutil.Process(process.pid).children()
        process.terminate()
        assert process.wait(5) == 0
        engine.wait(5)
        assert "Traceback" not in (tmp_path / "err").read_text()
        assert not (tmp_path / "pid").exists() and list((tmp_path / "run").iterdir()) == []
    finally:
        process.kill()


def test_a_broken_rule_is_told_before_any_weight_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {}}')
    os.mkfifo(tmp_path / "model.safetensors")  # whoever opens it waits for ever
    command = [sys.executable, "-m", "xllm_cli.cli", "serve", f"--model={tmp_path}", "--enable_vmm_weights=true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2 and "R2:" in done.stderr and "R3:" in done.stderr, done
