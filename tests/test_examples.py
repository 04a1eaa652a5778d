"""Every file in examples/ is run here, on a tiny checkpoint; a new one without a row is an error."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from checkpoints import tiny_checkpoint
from command_line import environment, shell, wait_for

from xllm_cli.argv import canonical
from xllm_cli.bench.load import Address
from xllm_cli.bench.servers import Server
from xllm_cli.cli import xllm
from xllm_cli.flags import FLAGS

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
RUN_HERE = {
    "serve_single.sh", "serve_elastic.sh", "serve_ranks.sh", "serve_config.sh", "config.json", "share_pool.sh",
    "openai_client.py", "llm_in_process.py", "xllm.service", "kubernetes.yaml",
}  # fmt: skip
CACHE = "--max_cache_size=16MiB"


def run(folder: Path, *command: str, **more: str) -> str:
    """The standard output of a command that must succeed within two minutes."""
    result = subprocess.run(
        command, cwd=ROOT, env=environment(folder, **more), capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    flags = [f"--model={tiny_checkpoint('llama')}", "--enable_vmm_kvcache=true", "--vmm_elastic=true", CACHE]
    with Server(flags, log=tmp_path_factory.mktemp("server") / "log") as running:
        yield running.address


def test_every_example_is_run_by_this_file() -> None:
    assert {path.name for path in (ROOT / "examples").iterdir() if path.is_file()} == RUN_HERE


def tool(name: str) -> str:
    """A program that CI has and a developer may lack."""
    if shutil.which(name) is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{name} is not installed")
    return name


def test_the_unit_is_one_and_waits_long_enough(tmp_path: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(EXAMPLES / "xllm.service")
    service = unit["Service"]
    command = service["ExecStart"].split()
    assert canonical(command[2:]).errors == [] and command[1] == "serve"
    waits = FLAGS["shutdown_timeout_secs"].default + 5
    assert service["Type"] == "notify" and int(service["TimeoutStopSec"]) > waits
    text = (EXAMPLES / "xllm.service").read_text().replace(command[0], shutil.which("true") or "")
    (tmp_path / "xllm.service").write_text(text)
    verify = [tool("systemd-analyze"), "verify", str(tmp_path / "xllm.service")]
    verified = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """The objects of the Kubernetes example by their kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())}


def test_the_manifest_starts_a_server_that_is_allowed(
    manifest: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pod = manifest["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert xllm.main([*container["args"], "--print_config"], prog_name="xllm", standalone_mode=False) == 0
    service = json.loads(capsys.readouterr().out)["service"]
    waits = service["shutdown_drain_secs"] + service["shutdown_timeout_secs"]
    assert service["shutdown_drain_secs"] >= 5 and pod["terminationGracePeriodSeconds"] > waits
    (port,) = container["ports"]
    assert port["containerPort"] == service["port"] == manifest["Service"]["spec"]["ports"][0]["port"]
    assert manifest["Service"]["spec"]["selector"] == manifest["Deployment"]["spec"]["selector"]["matchLabels"]
    mounted, given = {mount["name"] for mount in container["volumeMounts"]}, {one["name"] for one in pod["volumes"]}
    assert mounted == given


@pytest.mark.server
def test_the_probes_of_the_manifest_are_answered(manifest: dict[str, Any], server: Address) -> None:
    (container,) = manifest["Deployment"]["spec"]["template"]["spec"]["containers"]
    paths = [container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert paths == ["/health", "/livez", "/readyz"]
    assert [httpx.get(f"http://{server.authority}{path}").status_code for path in paths] == [200, 200, 200]


@pytest.mark.parametrize("script", [*sorted(EXAMPLES.glob("*.sh")), ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_scripts_are_clean(script: Path) -> None:
    checked = subprocess.run([tool("shellcheck"), str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout


def test_llm_in_process(tmp_path: Path) -> None:
    output = run(tmp_path, sys.executable, "examples/llm_in_process.py", str(tiny_checkpoint("llama")))
    assert len(re.findall(r" -> '.*' \((length|stop)\)", output)) == 3
    mapped = re.search(r"mapped (\d+)", output)
    assert mapped and int(mapped[1]) > 0


@pytest.mark.server
def test_openai_client(server: Address, tmp_path: Path) -> None:
    output = run(tmp_path, sys.executable, "examples/openai_client.py", f"http://{server.authority}")
    assert re.search(r"\d+ tokens in, ([1-9]|[12]\d|3[0-2]) out\n", output)


@pytest.mark.server
def test_serve_elastic(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = (str(EXAMPLES / "serve_elastic.sh"), str(tiny_checkpoint("llama")))
    output = run(tmp_path, *script, PORT=str(port), MAX_CACHE_SIZE="16MiB")
    before, during, after = re.findall(r'(?:before|during|after): .*"mapped": ?(\d+)', output)
    assert int(before) == int(after) == 0 < int(during)
    assert output.count('"physical"') == 3
    assert '"finish_reason"' in output


@pytest.mark.server
def test_share_pool(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    models = (str(tiny_checkpoint("llama")), str(tiny_checkpoint("qwen3")))
    output = run(tmp_path, str(EXAMPLES / "share_pool.sh"), *models, PORT=str(port), MAX_CACHE_SIZE="16MiB")
    moves = re.findall(r'"model_id": ?"(\w)", ?"before": ?"(\w+)", ?"after": ?"(\w+)"', output)
    assert moves == [
        ("A", "awake", "light"), ("B", "absent", "awake"), ("B", "awake", "light"), ("A", "light", "awake")
    ]  # fmt: skip
    answers = re.findall(r'"model": ?"(\w)".*?"text": ?"((?:[^"\\]|\\.)*)"', output)
    assert [name for name, text in answers if text] == ["A", "B", "A"]
    assert answers[0][1] == answers[2][1] != answers[1][1]
    sizes = {int(size) for size in re.findall(r'"physical": ?(\d+)', output)}
    assert len(sizes) == 1, "the pool neither grew nor shrank"


@pytest.mark.server
def test_serve_single(tmp_path: Path) -> None:
    model, listen = str(tiny_checkpoint("llama")), ["--port=0", "--host=127.0.0.1"]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [str(EXAMPLES / "serve_single.sh"), model, *listen, CACHE],
            env=environment(tmp_path),
            stdout=out,
            stderr=out,
        )
    try:
        url = wait_for(tmp_path / "out", r"^xllm is ready on (\S+): llama", process)[1]
        assert "all is well" in shell(f"xllm check {url}", tmp_path).stdout
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()


def test_serve_config(tmp_path: Path) -> None:
    printed = json.loads(run(tmp_path, str(EXAMPLES / "serve_config.sh"), "/m", "--port=9", "--print_config"))
    given = json.loads((EXAMPLES / "config.json").read_text())
    assert printed["service"] == printed["service"] | given["ServiceConfig"] | {"port": 9}
    assert printed["vmm"] == printed["vmm"] | given["VmmConfig"] and printed["model"]["model"] == "/m"
    assert printed["scheduler"]["max_tokens_per_chunk_for_prefill"] == given["max_tokens_per_chunk_for_prefill"]


@pytest.mark.server
def test_serve_ranks(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    script = f"{EXAMPLES}/serve_ranks.sh {tiny_checkpoint('llama')} --host=127.0.0.1 {CACHE}"
    ran = shell(script, tmp_path, START_PORT=port)
    (pid_file,) = (tmp_path / "log").glob("node_*.pid")
    server = psutil.Process(int(pid_file.read_text()))
    assert ran.stdout == f"ready on port {port}, pids: {server.pid} \n"
    server.terminate()
    server.wait(20)
    assert not pid_file.exists() and "xllm is ready" in (tmp_path / "log" / "node_0.log").read_text()
