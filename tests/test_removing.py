"""Models taken out of a running server over HTTP: what is answered, what is refused, and what nobody shows any more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from local_serving import ScriptedServing, local_serving
from scripted_server import Server, ask, error_of, serving, wait_until, write_model
from several_models import FLAGS, WEIGHTS, folder, fork, listed, refused
from test_cli import Ran

from xllm_cli.server import removing

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


def test_what_is_removed_is_nowhere_any_more(http: httpx.Client, models: Path) -> None:
    fork(http, folder(models, "gone"))
    ask(http, "x", model="gone")
    done = http.delete("/v1/models/gone").json()
    assert (done["id"], done["object"], done["deleted"]) == ("gone", "model", True)
    assert (done["model_id"], done["before"], done["after"], done["freed"]) == ("gone", "awake", "absent", WEIGHTS)
    assert done["milliseconds"] > 0 and "physical" in done
    assert "gone" not in listed(http) and "gone" not in http.get("/vmm").json()["models"]
    assert '"gone"' not in http.get("/metrics").text
    for answer in (ask(http, "x", model="gone"), http.get("/v1/models/gone"), http.delete("/v1/models/gone")):
        assert refused(answer) == (404, "model_not_found")


def test_its_name_is_free(http: httpx.Client, models: Path) -> None:
    fork(http, folder(models, "first home"), model_id="moves")
    ask(http, "xyz", model="moves")
    http.delete("/v1/models/moves")
    other = folder(models, "second home", template=None)
    assert fork(http, other, model_id="moves")["before"] == "absent" and listed(http)["moves"]["root"] == other
    lines = [line for line in http.get("/metrics").text.splitlines() if '"moves"' in line]
    assert [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:prompt_tokens_total")] == [0]
    assert ask(http, "x", chat=True, model="moves").status_code == 400  # this one has no template
    assert ask(http, "x", model="moves").json()["model"] == "moves"


def test_openais_client_removes(server: Server, http: httpx.Client, models: Path) -> None:
    fork(http, folder(models, "sdk"), model_id="ft:tiny:org/name")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        done = sdk.models.delete("ft:tiny:org/name")
        assert (done.id, done.object, done.deleted) == ("ft:tiny:org/name", "model", True)
        with pytest.raises(openai.NotFoundError):
            sdk.models.delete("ft:tiny:org/name")


@pytest.mark.parametrize("name", ["org/name", "/org//name/", "a b", "né", "100%", "what?", "a#b", "a%2Fb"])
def test_whatever_its_name(http: httpx.Client, models: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    fork(http, folder(models, "named"), model_id=name)
    ran = Ran(capsys, "remove", name, f"--url={http.base_url}")
    assert ran.code == 0 and ran.out.startswith(f"{name}: awake → absent in ") and name not in listed(http)


def test_a_path_is_no_name_here(http: httpx.Client, models: Path) -> None:
    path = folder(models, "one of two")
    for name in ("one", "two"):
        fork(http, path, model_id=name)
    assert http.get(f"/v1/models/{path}").json()["id"] == "one"
    assert refused(http.delete(f"/v1/models/{path}")) == (404, "model_not_found") and {"one", "two"} < set(listed(http))


@pytest.mark.parametrize("asked", ["tiny", "/tiny/", "tiny?mode=abort"])
def test_the_first_stays(http: httpx.Client, asked: str) -> None:
    assert refused(http.delete(f"/v1/models/{asked}")) == (409, "first_model") and "tiny" in listed(http)


@pytest.mark.parametrize(
    ("query", "body"),
    [("?mode=now", {}), ("?mod=wait", {}), ("?mode=wait", {"mode": "abort"}), ("", {"mode": 1}), ("", {"model": "x"})],
)
def test_a_wrong_question_removes_nothing(http: httpx.Client, models: Path, query: str, body: Any) -> None:
    fork(http, folder(models, "kept"))
    answer = http.request("DELETE", f"/v1/models/kept{query}", json=body)
    assert refused(answer) == (400, "invalid_value") and "kept" in listed(http)


@pytest.mark.parametrize("state", [{"master_status": 1}, {"master_status": 2}, {"park": True}])
def test_who_sleeps_leaves_too(http: httpx.Client, models: Path, state: Any) -> None:
    fork(http, folder(models, "dreamer"))
    asleep = http.post("/sleep", json={"model_id": "dreamer", **state}).json()["after"]
    done = http.request("DELETE", "/v1/models/dreamer", json={"mode": "wait"}).json()
    assert (done["before"], done["after"]) == (asleep, "absent") and "dreamer" not in listed(http)


def test_what_the_engine_refuses_can_be_tried_again(http: httpx.Client, models: Path) -> None:
    fork(http, folder(models, "stuck"))
    folder(models, "stuck", error=[503, "remove_failed"])
    answer = http.delete("/v1/models/stuck")
    assert refused(answer) == (503, "remove_failed") and answer.headers["retry-after"] == "1"
    assert listed(http)["stuck"]["state"] == "awake" and '"stuck"' in http.get("/metrics").text
    folder(models, "stuck")
    assert http.delete("/v1/models/stuck").json()["deleted"]


def test_while_it_leaves_its_name_is_taken(server: Server, http: httpx.Client, models: Path) -> None:
    path = folder(models, "slow")
    fork(http, path)
    folder(models, "slow", delay=3.0)
    with ThreadPoolExecutor(2) as pool:
        removals = [pool.submit(httpx.delete, f"{server.url}/v1/models/slow?mode=wait", timeout=60) for _ in range(2)]
        wait_until(lambda: listed(http)["slow"]["state"] == "leaving")
        answer = http.post("/fork_master", json={"model_path": path})
        assert refused(answer) == (409, "model_changing") and "being removed" in error_of(answer)["message"]
        # the scripted engine knows only one of them
        assert sorted(removal.result().status_code for removal in removals) == [200, 404]
    assert "slow" not in listed(http) and '"slow"' not in http.get("/metrics").text


def test_a_removal_goes_on_without_its_client(server: Server, http: httpx.Client, models: Path) -> None:
    fork(http, folder(models, "alone"))
    folder(models, "alone", delay=1.0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.delete(f"{server.url}/v1/models/alone", timeout=0.2)
    assert listed(http).get("alone", {"state": "leaving"})["state"] == "leaving"
    wait_until(lambda: "alone" not in listed(http))


@pytest.mark.parametrize("next_order", ["remove", "fork"])
def test_a_removal_that_took_too_long_is_seen_by_the_next_order(
    tmp_path: Path, next_order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = folder(tmp_path, "slow"), folder(tmp_path, "other")
    with local_serving(tmp_path, write_model(tmp_path / "tiny"), ScriptedServing, vmm=FLAGS) as local:
        assert local.post("/fork_master", model_path=path).status_code == 200
        folder(tmp_path, "slow", delay=0.6)
        monkeypatch.setattr(removing, "MOVE_SECONDS", 0.1)
        assert refused(local.request("DELETE", "/v1/models/slow")) == (503, "engine_busy")
        monkeypatch.setattr(removing, "MOVE_SECONDS", 30.0)
        assert local.post("/pause").status_code == 200  # the engine has come so far
        if next_order == "remove":
            assert refused(local.request("DELETE", "/v1/models/slow")) == (404, "model_not_found")
            assert local.state.models.get("slow") is None
        else:
            done = local.post("/fork_master", model_path=other, model_id="slow").json()
            assert (done["before"], done["after"]) == ("absent", "awake")


def test_a_fork_that_took_too_long_can_be_removed(tmp_path: Path) -> None:
    with local_serving(tmp_path, write_model(tmp_path / "tiny"), ScriptedServing, vmm=FLAGS) as local:
        assert local.post("/fork_master", model_path=folder(tmp_path, "late")).status_code == 200
        late = local.state.models.get("late")
        assert late is not None
        local.state.forget(late)  # as if its answer had not come in time
        assert local.request("DELETE", "/v1/models/late").json()["deleted"]


def test_its_tokenizer_goes_with_it(tmp_path: Path) -> None:
    with local_serving(tmp_path, write_model(tmp_path / "tiny"), ScriptedServing, vmm=FLAGS) as local:
        assert local.post("/fork_master", model_path=folder(tmp_path, "big")).status_code == 200
        assert local.post("/v1/completions", prompt="x", model="big").status_code == 200
        model = local.state.models.get("big")
        assert model is not None and model.tokenizer is not None
        traces = [weakref.ref(model.tokenizer), weakref.ref(model.instruments)]
        del model
        assert local.request("DELETE", "/v1/models/big").status_code == 200
        gc.collect()
        assert [trace() for trace in traces] == [None, None]
        assert local.state.instruments.of("big") is not local.state.instruments.first  # made anew
