"""Several models behind one server: asked by name, put to sleep, paused, limited and measured one by one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_app import local_state
from scripted_models import CONTEXT
from scripted_server import Server, ask, error_of, open_stream, script, serving, wait_until, write_model
from several_models import FLAGS, SHOUTING, folder, fork, listed, refused

from xllm_cli.errors import RequestError
from xllm_cli.server.served import ServedModel

pytestmark = pytest.mark.server
CHAT = [{"role": "user", "content": "hé"}]


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


@pytest.fixture(scope="module")
def loud(http: httpx.Client, models: Path) -> str:
    """The id of a second model, which answers in its own template."""
    return str(fork(http, folder(models, "loud"))["model_id"])


def test_requests_go_to_the_model_they_name(http: httpx.Client, loud: str, models: Path) -> None:
    named = {loud: "loud", str(models / "loud"): "loud", f"{models}/loud/": "loud", "tiny": "tiny", "": "tiny"}
    for name, model in {**named, None: "tiny"}.items():
        answer = ask(http, "hé", chat=True, model=name).json()
        assert answer["model"] == model, name
        assert ("HÉ!" in answer["choices"][0]["message"]["content"]) == (model == "loud")


def test_all_routes_know_the_names(http: httpx.Client, loud: str) -> None:
    assert ask(http, "x", model=loud).json()["model"] == loud
    stream = ask(http, "x", model=loud, stream=True).text
    assert stream.count('"model":"loud"') == stream.count('"object"') > 0
    rendered = http.post("/v1/chat/completions/render", json={"messages": CHAT, "model": loud}).json()
    assert (rendered["model"], rendered["prompt"]) == (loud, "HÉ!")
    assert http.post("/tokenize", json={"messages": CHAT, "model": loud}).json()["tokens"] == rendered["token_ids"]
    assert http.post("/detokenize", json={"tokens": [64], "model": loud}).json() == {"prompt": "a"}
    assert http.post("/v1/responses", json={"input": "hé", "model": loud}).json()["model"] == loud
    message = {"messages": CHAT, "max_tokens": 9, "model": loud}
    assert http.post("/v1/messages", json=message).json()["model"] == loud
    assert http.post("/v1/messages/count_tokens", json=message).json() == {"input_tokens": len("HÉ!".encode())}
    assert http.get("/tokenizer_info", params={"model": loud}).json()["chat_template"] == SHOUTING
    assert http.get("/health_generate", params={"model": loud}).status_code == 200
    assert http.get(f"/v1/models/{loud}").json() == listed(http)[loud]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": CHAT}), ("/tokenize", {}),
        ("/detokenize", {"tokens": []}), ("/sleep", {}), ("/wakeup", {}), ("/wake_up", {}), ("/pause", {}),
        ("/resume", {}), ("/update_weights", {}), ("/vmm/limit", {"bytes": 1}), ("/vmm/trim", {}),
    ],
)  # fmt: skip
def test_an_unknown_name_is_told_those_there_are(http: httpx.Client, loud: str, path: str, body: Any) -> None:
    field = "model" if path.startswith("/v1") or path.endswith("tokenize") else "model_id"
    answer = http.post(path, json={**body, field: "nobody"})
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", field)
    assert "tiny, " in error["message"] and "loud" in error["message"]


def test_the_list_shows_every_model(http: httpx.Client, loud: str, models: Path) -> None:
    cards = listed(http)
    assert list(cards)[:2] == ["tiny", "loud"]
    assert cards["loud"]["root"] == str(models / "loud") and cards["loud"]["max_model_len"] == CONTEXT
    assert {(card["state"], card["is_paused"]) for card in (cards["tiny"], cards["loud"])} == {("awake", False)}
    assert http.get("/model_info").json()["served_model_name"] == "tiny"
    assert http.get("/v1/models/nobody").status_code == 404


def test_names_are_found_by_id_before_path_and_not_all_are_told(tmp_path: Path) -> None:
    with local_state(tmp_path) as state:
        for number in range(30):
            name = f"m{number}" if number else "/tiny"  # the first model's folder
            state.models.add(ServedModel(name, "/tiny", state.instruments.of(name)))
        assert state.models.find("/tiny").model_id == "/tiny" and state.models.find("tiny/").model_id == "tiny"
        assert state.models.find(None) is state.models.find("") is state.models.first
        with pytest.raises(RequestError, match=r"this server has tiny, /tiny, m1, .* and 11 more"):
            state.models.find("nobody")


# --- changed one by one


def test_models_sleep_one_by_one(http: httpx.Client, loud: str) -> None:
    assert http.post("/sleep", json={"model_id": loud, "master_status": 2}).json()["after"] == "deep"
    assert http.get("/is_sleeping", params={"model_id": loud}).json() == {"is_sleeping": True, "state": "deep"}
    assert http.get("/is_sleeping").json()["is_sleeping"] is False
    assert refused(ask(http, "x", model=loud)) == (503, "model_sleeping") and ask(http, "x").status_code == 200
    assert refused(http.post(f"/sleep?level=2&model_id={loud}")) == (409, "already_asleep")
    assert http.post(f"/wake_up?tags=kv_cache&model_id={loud}").json()["after"] == "deep"
    woken = http.post(f"/wake_up?tags=weights&model_id={loud}").json()
    assert (woken["model_id"], woken["before"], woken["after"]) == (loud, "deep", "awake")
    assert refused(http.post("/wakeup", json={"model_id": loud})) == (409, "already_awake")
    assert ask(http, "x", model=loud).status_code == 200


def test_weights_are_exchanged(http: httpx.Client, models: Path) -> None:
    old, new = folder(models, "old"), folder(models, "new")
    fork(http, old, model_id="updated")
    done = http.post("/update_weights", json={"model_id": "updated", "model_path": new}).json()
    assert (done["model_id"], done["model_path"], done["after"]) == ("updated", new, "awake")
    assert listed(http)["updated"]["root"] == new
    assert http.post(f"/update_weights?model_id=updated&path={old}").json()["model_path"] == old
    assert http.post("/update_weights", json={"model_id": "updated"}).json()["model_path"] == old
    for body in ({"path": old, "model_path": new}, {"path": "/nowhere"}, {"path": ""}):
        assert http.post("/update_weights", json={"model_id": "updated", **body}).status_code == 400
    folder(models, "new", error=[503, "weights_memory_unavailable"])
    answer = http.post("/update_weights", json={"model_id": "updated", "path": new})
    assert refused(answer) == (503, "weights_memory_unavailable") and listed(http)["updated"]["root"] == old


def test_a_tokenizer_comes_with_the_weights_it_belongs_to(http: httpx.Client, models: Path) -> None:
    def said() -> str:
        return str(ask(http, "hé", chat=True, model="worded").json()["choices"][0]["message"]["content"])

    def update(path: str) -> str:
        return str(http.post("/update_weights", json={"model_id": "worded", "model_path": path}).json()["tokenizer"])

    old = folder(models, "worded")
    fork(http, old)
    assert said() == "HÉ!"
    assert update(old) == "kept" and update(folder(models, "same words")) == "kept"
    other = folder(models, "other words", template="{% for m in messages %}{{ m.content }}?{% endfor %}")
    assert update(other) == "exchanged" and said() == "hé?"
    assert http.get("/tokenizer_info", params={"model": "worded"}).json()["chat_template"].endswith("?{% endfor %}")
    (models / "same words" / "tokenizer.json").unlink()
    assert update(str(models / "same words")) == "kept" and said() == "hé?"  # weights alone
    folder(models, "same words")
    assert http.post("/update_weights", json={"model_id": "worded"}).json()["tokenizer"] == "exchanged"
    assert said() == "HÉ!"  # the same folder has other files by now


def test_a_tokenizer_stays_with_weights_that_stay(http: httpx.Client, models: Path) -> None:
    fork(http, folder(models, "steady"))
    torn = folder(models, "torn words", template=None)
    (models / "torn words" / "tokenizer.json").write_text("{")
    answer = http.post("/update_weights", json={"model_id": "steady", "model_path": torn})
    assert refused(answer) == (400, "model_invalid") and "cannot be read" in error_of(answer)["message"]
    scarce = folder(models, "scarce", template=None, error=[503, "weights_memory_unavailable"])
    answer = http.post("/update_weights", json={"model_id": "steady", "model_path": scarce})
    assert answer.status_code == 503 and listed(http)["steady"]["root"] == str(models / "steady")
    assert ask(http, "hé", chat=True, model="steady").json()["choices"][0]["message"]["content"] == "HÉ!"


def test_a_paused_models_requests_wait(http: httpx.Client, server: Server, loud: str) -> None:
    paused = http.post("/pause", json={"model_id": loud}).json()
    assert paused["status"] == "paused" and paused["models"] == {loud: {"before": "running", "after": "paused"}}
    assert (listed(http)[loud]["is_paused"], listed(http)["tiny"]["is_paused"]) == (True, False)
    assert http.get("/is_paused", params={"model_id": loud}).json() == {"is_paused": True}
    assert server.gauge('xllm:model_paused{engine="0",model_name="loud"}') == 1
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, f"{server.url}/v1/completions", json={"prompt": "x", "model": loud})
        assert ask(http, "x").status_code == 200
        assert not waiting.done()
        resumed = http.post("/resume", json={"model_id": loud}).json()
        assert resumed["status"] == "running" and waiting.result().status_code == 200
    assert resumed["models"] == {loud: {"before": "paused", "after": "running"}}


def test_a_pause_without_a_name_is_for_all(http: httpx.Client, loud: str) -> None:
    paused = http.post("/pause?mode=wait").json()
    assert {one["after"] for one in paused["models"].values()} == {"paused"} and set(paused["models"]) >= {"tiny", loud}
    assert {one["after"] for one in http.post("/resume").json()["models"].values()} == {"running"}
    assert refused(http.post("/pause", json={"mode": "later"})) == (400, "invalid_value")
    assert refused(http.post("/resume", json={"mode": "keep"})) == (400, "invalid_value")


def test_a_model_has_a_limit_of_its_own(http: httpx.Client, loud: str) -> None:
    assert http.post("/vmm/limit", json={"bytes": 9, "model_id": loud}).json()["limit"] == 9
    assert http.get("/vmm").json()["limit"] is None
    assert http.post("/vmm/limit", json={"bytes": 8}).json()["limit"] == 8
    trimmed = http.post("/vmm/trim", json={"model_id": loud}).json()
    assert (trimmed["model_id"], trimmed["limit"], trimmed["mapped"]) == (loud, 9, 2 << 20)
    assert http.post("/vmm/limit", json={"bytes": 0, "model_id": loud}).json()["limit"] is None
    assert http.post("/vmm/limit", json={"bytes": 0}).json()["limit"] is None


# --- measured one by one


def series(text: str, model: str) -> set[str]:
    """The series of a model, without the model's name."""
    return {line.rsplit(" ", 1)[0].replace(f'"{model}"', '""') for line in text.splitlines() if f'"{model}"' in line}


def test_a_forks_series_are_those_of_the_first_and_begin_at_zero(http: httpx.Client, models: Path) -> None:
    ask(http, "x")
    fork(http, folder(models, "fresh"))
    text = http.get("/metrics").text
    of_the_server = ("xllm:vmm_map_seconds", "xllm:open_http_requests", "xllm:ready")
    first = {name for name in series(text, "tiny") if not name.startswith(of_the_server)}
    assert first == series(text, "fresh") and 'xllm:model_state{model="",state="awake"}' in first
    lines = [line for line in text.splitlines() if '"fresh"' in line and not line.endswith(" 0.0")]
    assert {line.partition("{")[0] for line in lines} == {
        "vllm:cache_config_info", "xllm:model_state", "xllm:kv_admissible_bytes",
    }  # fmt: skip


def test_requests_count_for_their_own_model(server: Server, http: httpx.Client, loud: str) -> None:
    def of(name: str, model: str) -> float:
        return server.gauge(f'vllm:{name}{{engine="0",model_name="{model}"}}')

    before = {model: of("prompt_tokens_total", model) for model in ("tiny", loud)}
    ask(http, "abc", model=loud)
    assert {model: of("prompt_tokens_total", model) - before[model] for model in before} == {"tiny": 0, loud: 3}
    stream = open_stream(server, script(endless=True, delay=0.05), stream=True, model=loud)
    wait_until(lambda: of("num_requests_running", loud) == 1)
    assert of("num_requests_running", "tiny") == 0 and of("generation_tokens_total", loud) > 0
    stream.close()
    wait_until(lambda: of("num_requests_running", loud) == 0)


def test_every_model_loads_the_server_by_tokens_of_its_own(server: Server, http: httpx.Client, models: Path) -> None:
    name = str(fork(http, folder(models, "narrow", bytes_per_block=1 << 18))["model_id"])
    streams = [
        open_stream(server, script(endless=True, delay=0.05), stream=True, model=model)
        for model in (name, name, "tiny")
    ]
    wait_until(lambda: http.get("/v1/loads").json()["aggregate"]["total_running_reqs"] == 3)
    loads = http.get("/v1/loads").json()
    used = {model: load["num_used_tokens"] for model, load in loads["models"].items() if load["num_used_tokens"]}
    assert used == {"tiny": 128, name: 2 * 4 * 128}  # a block has 128 tokens, the scripted request 1 MiB
    (rank,) = loads["loads"]
    assert rank["num_used_tokens"] == sum(used.values()) and rank["max_total_num_tokens"] == CONTEXT
    assert rank["token_usage"] == sum(used.values()) / CONTEXT == loads["aggregate"]["avg_token_usage"]
    for stream in streams:
        stream.close()
    server.wait_idle()
