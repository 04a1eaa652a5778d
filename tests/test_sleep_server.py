"""A model that sleeps and wakes over HTTP: real servers, real memory, everything that may come in between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from checkpoints import tiny_checkpoint
from real_server import Serving
from test_cli import Ran

MIB = 1 << 20
WEIGHTS = ("--enable_vmm_weights=true", "--vmm_elastic=true", "--block_size=16", "--dtype=float32")
KINDS = {
    "elastic": (*WEIGHTS, "--enable_vmm_kvcache=true", f"--max_cache_size={64 * MIB}"),
    "fixed": (*WEIGHTS, "--enable_vmm_kvcache=true", "--vmm_elastic=false", f"--max_cache_size={16 * MIB}"),
    "weights alone": (*WEIGHTS, f"--max_cache_size={16 * MIB}"),
}
BEDS = {"light": {"master_status": 1}, "deep": {"master_status": 2}, "parked": {"park": True}}
PROMPT = [7, 8, 9] * 90


def serve(folder: Path, *flags: str) -> Serving:
    return Serving(folder, tiny_checkpoint("llama"), *flags, f"--vmm_neighbours_dir={folder}")


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    serving = serve(tmp_path_factory.mktemp("sleep"), *KINDS[request.param])
    yield serving
    assert serving.stop() == 0, serving.log.read_text()


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    serving = serve(tmp_path_factory.mktemp("elastic"), *KINDS["elastic"])
    yield serving
    assert serving.stop() == 0, serving.log.read_text()


def post(server: Serving, path: str, **body: object) -> dict:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def greedy(server: Serving) -> list[str]:
    asked = ({"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}, {"prompt": [11] * 20, "max_tokens": 12})
    return [server.complete(**one)["choices"][0]["text"] for one in asked]


# --- one after the other


@pytest.mark.parametrize("state", BEDS)
def test_the_same_answers_before_and_after(server: Serving, state: str) -> None:
    expected = greedy(server)
    asleep = post(server, "/sleep", model_id="llama", **BEDS[state])
    assert (asleep["model_id"], asleep["before"], asleep["after"]) == ("llama", "awake", state)
    assert asleep["milliseconds"] > 0 and asleep["physical"] == server.vmm()["physical"]
    awake = post(server, "/wakeup", model_id="llama")
    assert (awake["before"], awake["after"]) == (state, "awake")
    assert greedy(server) == expected


def test_asleep_it_holds_nothing_that_others_could_use(elastic: Serving) -> None:
    greedy(elastic)
    before = elastic.memfd_bytes()
    assert before > 0
    for state, body in BEDS.items():
        answer = post(elastic, "/sleep", **body)
        held = elastic.memfd_bytes()
        assert held == answer["physical"] == elastic.vmm()["parked"]
        assert (held > 0) if state == "parked" else (held <= before / 100 and answer["freed"] > 0)
        taken = post(elastic, "/wakeup")["taken"]
        assert (taken == 0) if state == "parked" else (taken == elastic.vmm()["weights"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "hi"}), ("completions", {"prompt": "hi", "stream": True}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
    ],
)  # fmt: skip
def test_a_request_to_a_sleeping_model_is_told_to_come_back(elastic: Serving, path: str, body: dict) -> None:
    post(elastic, "/sleep")
    answer = elastic.http.post(f"/v1/{path}", json=body)
    post(elastic, "/wakeup")
    assert refused(answer) == (503, "model_sleeping") and answer.headers["retry-after"] == "1"


def test_a_sleeping_server_answers_all_the_same(elastic: Serving) -> None:
    post(elastic, "/sleep", park=True)
    assert elastic.http.get("/health").json() == {"status": "healthy", "state": "parked"}
    assert elastic.http.get("/v1/models").json()["data"][0]["state"] == "parked"
    assert elastic.http.get("/is_sleeping").json() == {"is_sleeping": True, "state": "parked"}
    assert elastic.http.get("/livez").status_code == elastic.http.get("/readyz").status_code == 200
    assert 'xllm:model_state{model="llama",state="parked"} 1.0' in elastic.http.get("/metrics").text
    assert post(elastic, "/vmm/limit", bytes=8 * MIB)["limit"] == 8 * MIB
    trimmed = post(elastic, "/vmm/trim")
    assert trimmed["freed"] > 0 and elastic.memfd_bytes() == trimmed["physical"] == 0
    post(elastic, "/vmm/limit", bytes=0)
    assert post(elastic, "/wakeup")["before"] == "light"
    assert elastic.http.get("/is_sleeping").json() == {"is_sleeping": False, "state": "awake"}
    assert elastic.metric("xllm:wake_seconds_count") > 0 < elastic.metric("xllm:sleep_seconds_count")


def test_vllms_spellings(elastic: Serving) -> None:
    expected = greedy(elastic)
    asleep = elastic.http.post("/sleep?level=2&mode=abort").json()
    assert asleep["after"] == "deep"
    kv = elastic.http.post("/wake_up?tags=kv_cache").json()
    assert kv["after"] == "deep" and "still sleep" in kv["message"]
    assert elastic.http.post("/wake_up?tags=kv_cache,weights&tags=weights").json()["after"] == "awake"
    assert elastic.http.post("/wake_up?tags=kv_cache").json()["after"] == "awake"
    assert elastic.http.post("/sleep").json()["after"] == "light"
    assert elastic.http.post("/wake_up").json()["after"] == "awake"
    assert greedy(elastic) == expected


def test_what_is_so_already_is_a_conflict(elastic: Serving) -> None:
    assert refused(elastic.http.post("/wakeup")) == (409, "already_awake")
    post(elastic, "/sleep")
    assert refused(elastic.http.post("/sleep")) == (409, "already_asleep")
    assert post(elastic, "/sleep", master_status=2)["before"] == "light"
    assert post(elastic, "/wake_up")["after"] == "awake"


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/sleep", {"master_status": 0}, 400, "invalid_value"), ("/sleep", {"master_status": 3}, 400, "invalid_value"),
        ("/sleep", {"park": 1}, 400, "invalid_value"), ("/sleep", {"mode": "now"}, 400, "invalid_value"),
        ("/sleep", {"levle": 2}, 400, "invalid_value"), ("/sleep?level=0", {}, 400, "invalid_value"),
        ("/sleep?level=2", {"master_status": 1}, 400, "invalid_value"), ("/sleep?levle=2", {}, 400, "invalid_value"),
        ("/sleep?mode=wait", {"mode": "abort"}, 400, "invalid_value"),
        ("/sleep?level=1&level=2", {}, 400, "invalid_value"), ("/sleep?park=true", {"level": 2}, 400, "invalid_value"),
        ("/sleep", {"model_id": "other"}, 404, "model_not_found"),
        ("/wakeup", {"model_id": "other"}, 404, "model_not_found"),
        ("/wakeup", {"master_status": 1}, 400, "invalid_value"),
        ("/wakeup", {"remote_addrs": ["h:1"]}, 400, "not_supported_yet"),
        ("/wake_up?tags=all", {}, 400, "invalid_value"), ("/wakeup?tags=weights", {}, 400, "invalid_value"),
        ("/fork_master", {}, 400, "invalid_value"),
        ("/fork_master", {"model_path": "/m"}, 400, "model_invalid"),
    ],
)  # fmt: skip
def test_a_wrong_question_changes_nothing(elastic: Serving, path: str, body: dict, status: int, code: str) -> None:
    assert refused(elastic.http.post(path, json=body)) == (status, code)
    assert elastic.http.get("/is_sleeping").json()["state"] == "awake"


# --- the commands


def test_the_commands_put_to_sleep_wake_and_show(elastic: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--url", elastic.url)
    ran = Ran(capsys, "sleep", "llama", "--level=2", *asked)
    assert ran.code == 0 and ran.out.startswith("llama: awake → deep in ") and "0.0MiB physical" in ran.out
    assert "  deep  " in Ran(capsys, "models", *asked).out
    ran = Ran(capsys, "sleep", *asked)
    assert ran.code == 1 and "409: the model is already asleep (deep)" in ran.err
    ran = Ran(capsys, "wake", *asked)
    assert ran.code == 0 and ran.out.startswith("llama: deep → awake in ")
    (line,) = Ran(capsys, "models", "--json", *asked).out.splitlines()
    assert json.loads(line)["state"] == "awake" and json.loads(line)["weights"] > 0
    assert Ran(capsys, "sleep", "--mode=now", *asked).code == Ran(capsys, "sleep", "--level=3", *asked).code == 2
    assert "404: no such model here; this server has llama" in Ran(capsys, "wake", "other", *asked).err
