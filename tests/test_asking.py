"""The commands that have a running server change its models: what they send, what they say, how they fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from scripted_server import Server, serving, write_model
from several_models import FLAGS, folder, listed
from test_cli import Ran

pytestmark = pytest.mark.server
Capsys = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("asked")
    with serving(base, write_model(base / "tiny"), **FLAGS) as running:
        running.wait_ready()
        httpx.post(f"{running.url}/fork_master", json={"model_path": folder(base, "loud")}, timeout=60)
        yield running


def run(capsys: Capsys, server: Server, *words: str) -> Ran:
    return Ran(capsys, *words, f"--url={server.url}")


def states(server: Server) -> dict[str, tuple[str, bool]]:
    with httpx.Client(base_url=server.url) as http:
        return {name: (card["state"], card["is_paused"]) for name, card in listed(http).items()}


def test_fork(capsys: Capsys, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path, "third")
    monkeypatch.chdir(tmp_path)
    ran = run(capsys, server, "fork", "third", "--model_id=given", "--level=1")
    assert ran.code == 0 and ran.out.startswith("given: absent → light in ") and "taken 0.0MiB" in ran.out
    assert "nothing done" in run(capsys, server, "fork", "third", "--model_id=given").out
    ran = run(capsys, server, "fork", "third")
    assert ran.out.startswith("third: absent → awake in ") and "taken 4.0MiB" in ran.out
    ran = run(capsys, server, "fork", "absent")
    assert ran.code == 2 and f"400: model_path {tmp_path}/absent is no folder" in ran.err
    assert run(capsys, server, "fork", "third", "--model_id=tiny").code == 1
    assert run(capsys, server, "fork").code == run(capsys, server, "fork", "third", "--level=3").code == 2


def test_a_model_is_named_in_two_ways(capsys: Capsys, server: Server) -> None:
    ran = run(capsys, server, "sleep", "--model_id=loud", "--level=2")
    assert ran.code == 0 and ran.out.startswith("loud: awake → deep in ") and "freed 4.0MiB" in ran.out
    assert run(capsys, server, "wake", "loud").out.startswith("loud: deep → awake in ")
    assert run(capsys, server, "sleep").out.startswith("tiny: awake → light in ")
    assert run(capsys, server, "wake", "tiny", "--model_id=tiny").code == 0
    ran = run(capsys, server, "sleep", "tiny", "--model_id=loud")
    assert ran.code == 2 and "tiny and --model_id=loud are two models" in ran.err
    assert "404: no such model here" in run(capsys, server, "wake", "--model_id=nobody").err


def test_pause_and_resume(capsys: Capsys, server: Server) -> None:
    ran = run(capsys, server, "pause", "loud", "--mode=abort")
    assert ran.code == 0 and ran.out.startswith("loud: running → paused in ")
    assert "  awake, paused  " in run(capsys, server, "models").out
    assert states(server)["loud"] == ("awake", True) and states(server)["tiny"] == ("awake", False)
    assert "tiny: running → paused in " in run(capsys, server, "pause").out
    assert run(capsys, server, "resume").out.startswith("tiny: paused → running in ")
    assert not any(is_paused for _, is_paused in states(server).values())
    assert run(capsys, server, "pause", "--mode=later").code == 2


def test_update(capsys: Capsys, server: Server, tmp_path: Path) -> None:
    path = folder(tmp_path, "newer")
    assert run(capsys, server, "update", "loud", f"--path={path}").out.startswith("loud: awake → awake in ")
    (line,) = (line for line in run(capsys, server, "models", "--json").out.splitlines() if '"loud"' in line)
    assert json.loads(line)["root"] == path
    assert run(capsys, server, "update", "loud").code == 0
    folder(tmp_path, "newer", error=[503, "weights_memory_unavailable"])
    ran = run(capsys, server, "update", "loud")
    assert ran.code == 1 and "503: what it lacks, with numbers" in ran.err


def test_remove(capsys: Capsys, server: Server, tmp_path: Path) -> None:
    run(capsys, server, "fork", folder(tmp_path, "leaves"))
    ran = run(capsys, server, "remove", "leaves", "--mode=wait")
    assert ran.code == 0 and ran.out.startswith("leaves: awake → absent in ") and "freed 4.0MiB" in ran.out
    assert "leaves" not in run(capsys, server, "models").out
    ran = run(capsys, server, "remove", "--model_id=leaves")
    assert ran.code == 1 and "404: " in ran.err
    ran = run(capsys, server, "remove", "tiny")
    assert ran.code == 1 and "409: the first model stays" in ran.err
    ran = run(capsys, server, "remove")
    assert ran.code == 2 and "name the MODEL to remove" in ran.err
    assert run(capsys, server, "remove", "tiny", "--mode=now").code == 2


def test_limits_of_one_model(capsys: Capsys, server: Server) -> None:
    ran = run(capsys, server, "vmm", "limit", "3MiB", "--model_id=loud")
    assert ran.code == 0 and "limit 3.0MiB" in ran.out
    assert "no limit" in run(capsys, server, "vmm", "trim").out
    assert "limit 3.0MiB" in run(capsys, server, "vmm", "trim", "--model_id=loud").out
    assert "no limit" in run(capsys, server, "vmm", "limit", "0", "--model_id=loud").out
    assert "404: no such model here" in run(capsys, server, "vmm", "limit", "1", "--model_id=nobody").err
