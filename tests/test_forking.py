"""Forks of other checkpoints into a running server: what they answer, what refuses them, races and lost clients."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_serving import ScriptedServing, local_serving
from scripted_server import Server, ask, error_of, serving, wait_until, write_model
from several_models import FLAGS, WEIGHTS, folder, fork, listed, refused

from xllm_cli.server import forking
from xllm_cli.server.tokenizer import Tokenizer

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), write_model(models / "tiny"), **FLAGS) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_a_fork_tells_what_it_took(http: httpx.Client, models: Path) -> None:
    made = fork(http, folder(models, "first"), model_id="named", master_node_addr="127.0.0.1:1", nnodes=1, dp_size=1)
    assert (made["model_id"], made["after"], made["taken"]) == ("named", "awake", WEIGHTS)
    assert made["milliseconds"] > 0 and made["weights"] == WEIGHTS
    asleep = fork(http, str(models / "first"), model_id="dozing", master_status=2)
    assert (asleep["after"], asleep["taken"]) == ("deep", 0)
    assert refused(ask(http, "x", model="dozing")) == (503, "model_sleeping")
    assert listed(http)["dozing"]["state"] == "deep"


def test_models_of_equal_files_have_one_tokenizer(server: Server, models: Path, tmp_path: Path) -> None:
    twin = shutil.copytree(models / "tiny", tmp_path / "twin")
    flags = {"tool_call_parser": "", "reasoning_parser": ""}
    known = Tokenizer.from_folder(models / "tiny")
    assert forking._read_checkpoint(str(twin), flags, [known]) is known
    (twin / "chat_template.jinja").write_text("{{ messages[0].content }}")
    other = forking._read_checkpoint(str(twin), flags, [known])
    assert other is not known and other.chat_template == "{{ messages[0].content }}"


def test_an_id_is_one_model(http: httpx.Client, models: Path, server: Server) -> None:
    path, other = folder(models, "once"), folder(models, "other")
    fork(http, path)
    again = fork(http, f"{path}/")
    assert (again["taken"], again["before"], again["after"]) == (0, "awake", "awake") and "nothing" in again["message"]
    answer = http.post("/fork_master", json={"model_path": other, "model_id": "once"})
    assert refused(answer) == (409, "model_exists") and path in error_of(answer)["message"]
    assert fork(http, str(models / "tiny"))["message"] and server.text().count("forked once ") == 1
    assert refused(http.post("/fork_master", json={"model_path": other, "model_id": "tiny"})) == (409, "model_exists")


def test_forks_of_one_id_at_once_make_one_model(server: Server, models: Path) -> None:
    path, other = folder(models, "raced", delay=0.5), folder(models, "late")

    def post(body: dict[str, str]) -> httpx.Response:
        return httpx.post(f"{server.url}/fork_master", json=body, timeout=60)

    bodies = [{"model_path": path}] * 5 + [{"model_path": other, "model_id": "raced"}]
    with ThreadPoolExecutor(6) as pool:
        answers = [answer.result() for answer in [pool.submit(post, body) for body in bodies]]
    # whoever is first gets the id; those who ask for the same find it done, the others find it taken
    statuses = [answer.status_code for answer in answers]
    assert statuses in ([200] * 5 + [409], [409] * 5 + [200])
    taken = [answer.json()["taken"] for answer in answers if answer.status_code == 200]
    assert sorted(taken, reverse=True) == [WEIGHTS, *[0] * (len(taken) - 1)]
    assert server.text().count("forked raced ") == 1


def test_a_fork_goes_on_without_its_client(server: Server, http: httpx.Client, models: Path) -> None:
    path = folder(models, "alone", delay=1.0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/fork_master", json={"model_path": path}, timeout=0.2)
    assert "alone" not in listed(http)
    wait_until(lambda: "alone" in listed(http))
    assert ask(http, "x", model="alone").json()["model"] == "alone"


def test_a_fork_that_took_too_long_is_found_when_asked_for_again(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder(models, "slow", delay=0.6)
    with local_serving(tmp_path, write_model(tmp_path / "tiny"), ScriptedServing, vmm=FLAGS) as serving:
        monkeypatch.setattr(forking, "MOVE_SECONDS", 0.1)
        assert refused(serving.post("/fork_master", model_path=path)) == (503, "engine_busy")
        assert serving.post("/v1/completions", prompt="x", model="slow").status_code == 404
        monkeypatch.setattr(forking, "MOVE_SECONDS", 30.0)
        done = serving.post("/fork_master", model_path=path).json()
        assert (done["before"], done["after"], done["taken"]) == ("awake", "awake", 0)
        assert serving.post("/v1/completions", prompt="x", model="slow").json()["model"] == "slow"


def test_what_the_engine_refuses_can_be_tried_again(http: httpx.Client, models: Path) -> None:
    path = folder(models, "large", error=[503, "weights_memory_unavailable"])
    answer = http.post("/fork_master", json={"model_path": path})
    assert refused(answer) == (503, "weights_memory_unavailable") and answer.headers["retry-after"] == "1"
    assert "large" not in listed(http) and "large" not in http.get("/metrics").text
    assert ask(http, "x", model="large").status_code == 404
    folder(models, "large")
    assert fork(http, path)["model_id"] == "large"


def test_a_folder_that_cannot_be_served_costs_the_engine_nothing(
    http: httpx.Client, models: Path, tmp_path: Path
) -> None:
    broken = {
        "nowhere": "is no folder", "empty": "has no config.json", "mute": "no tokenizer.json", "torn": "cannot be read",
        "hybrid": "(R7)", "seeing": "(R2)",
    }  # fmt: skip
    for name in ("mute", "torn", "hybrid", "seeing"):
        folder(tmp_path, name, error=[500, "asked"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "mute" / "tokenizer.json").unlink()
    (tmp_path / "torn" / "tokenizer.json").write_text("{")
    (tmp_path / "hybrid" / "config.json").write_text('{"layer_types": ["linear_attention"]}')
    (tmp_path / "seeing" / "config.json").write_text('{"vision_config": {}}')
    for name, reason in broken.items():
        answer = http.post("/fork_master", json={"model_path": str(tmp_path / name)})
        assert refused(answer) == (400, "model_invalid"), name
        assert reason in error_of(answer)["message"] and error_of(answer)["param"] == "model_path"


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"remote_addrs": ["h:1"]}, "not_supported_yet", "R12"),
        ({"src_weight_segments": [{"offset": 0, "size": 1}]}, "not_supported_yet", "R12"),
        ({"nnodes": 2}, "invalid_value", "more than this server's own, 1"),
        ({"dp_size": 2}, "invalid_value", "more than this server's own, 1"),
        ({"nnodes": 0}, "invalid_value", "nnodes"), ({"master_status": 3}, "invalid_value", "master_status"),
        ({"model_path": "/"}, "invalid_value", "give a model_id"), ({"model_id": ""}, "invalid_value", "model_id"),
        ({"model_path": "a\0b"}, "invalid_value", "model_path"), ({"model_path": 1}, "invalid_value", "model_path"),
        ({"model_id": "a\nb"}, "invalid_value", "model_id"), ({"modelid": "x"}, "invalid_value", "modelid"),
    ],
)  # fmt: skip
def test_a_fork_that_cannot_be(http: httpx.Client, models: Path, fields: Any, code: str, says: str) -> None:
    before = list(listed(http))
    named = {} if "model_path" in fields else {"model_path": str(models / "tiny"), "model_id": "never"}
    answer = http.post("/fork_master", json={**named, **fields})
    assert refused(answer) == (400, code) and says in error_of(answer)["message"]
    assert list(listed(http)) == before


def test_without_weights_in_pages_nothing_is_moved(tmp_path: Path) -> None:
    with serving(tmp_path, write_model(tmp_path / "tiny")) as plain, httpx.Client(base_url=plain.url) as http:
        plain.wait_ready()
        for path in ("/fork_master", "/sleep", "/wakeup", "/wake_up", "/update_weights"):
            assert refused(http.post(path, json={"model_path": "/m"})) == (400, "vmm_weights_required")
        assert http.post("/pause").json()["status"] == "paused" and http.post("/resume").status_code == 200


def test_while_it_loads_nothing_is_forked(tmp_path: Path) -> None:
    model, go = write_model(tmp_path / "tiny"), tmp_path / "go"
    with serving(tmp_path, model, "--load_until", str(go), **FLAGS) as server:
        body = {"model_path": str(model), "model_id": "second"}
        assert refused(httpx.post(f"{server.url}/fork_master", json=body)) == (503, "model_loading")
        card = httpx.get(f"{server.url}/v1/models").json()["data"][0]
        assert (card["id"], card["state"], card["max_model_len"]) == ("tiny", "loading", None)
        go.touch()
        server.wait_ready()
        assert httpx.post(f"{server.url}/fork_master", json=body, timeout=60).status_code == 200
