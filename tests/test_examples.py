"""Every file in examples/ is run here, on a tiny checkpoint; a new one without a row is an error."""

from __future__ import annotations

import configparser
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import tiny_checkpoint

from xllm_cli.argv import canonical
from xllm_cli.bench.load import Address
from xllm_cli.bench.servers import Server
from xllm_cli.flags import FLAGS

ROOT = Path(__file__).parent.parent
RUN_HERE = {"serve_elastic.sh", "openai_client.py", "llm_in_process.py", "xllm.service"}
CACHE = "--max_cache_size=16MiB"


def run(*command: str, **environment: str) -> str:
    """The standard output of a command that must succeed within two minutes."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path, **environment}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    flags = [f"--model={tiny_checkpoint('llama')}", "--enable_vmm_kvcache=true", "--vmm_elastic=true", CACHE]
    with Server(flags, log=tmp_path_factory.mktemp("server") / "log") as running:
        yield running.address


def test_every_example_is_run_by_this_file() -> None:
    assert {path.name for path in (ROOT / "examples").iterdir() if path.is_file()} == RUN_HERE


def test_the_service_starts_with_flags_that_exist_and_stops_in_time() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(ROOT / "examples" / "xllm.service")
    service = unit["Service"]
    command = service["ExecStart"].split()
    assert canonical(command[2:]).errors == [] and command[1] == "serve"
    waits = FLAGS["shutdown_timeout_secs"].default + 5
    assert service["Type"] == "notify" and int(service["TimeoutStopSec"]) > waits


def test_llm_in_process() -> None:
    output = run(sys.executable, "examples/llm_in_process.py", str(tiny_checkpoint("llama")))
    assert len(re.findall(r" -> '.*' \((length|stop)\)", output)) == 3
    mapped = re.search(r"mapped (\d+)", output)
    assert mapped and int(mapped[1]) > 0


@pytest.mark.server
def test_openai_client(server: Address) -> None:
    output = run(sys.executable, "examples/openai_client.py", f"http://{server.authority}")
    assert re.search(r"\d+ tokens in, ([1-9]|[12]\d|3[0-2]) out\n", output)


@pytest.mark.server
def test_serve_elastic() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = run("examples/serve_elastic.sh", str(tiny_checkpoint("llama")), PORT=str(port), MAX_CACHE_SIZE="16MiB")
    before, after = (re.search(rf'{when}: .*"mapped": ?(\d+)', output) for when in ("before", "after"))
    assert before and after and int(after[1]) >= int(before[1])
    assert '"finish_reason"' in output
