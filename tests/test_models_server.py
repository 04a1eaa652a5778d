"""Several real models in one server, over HTTP: forked, shared, exchanged, paused, removed, and seen from a second
process."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from checkpoints import tiny_checkpoint
from real_server import Serving
from several_models import fork, listed, refused

MIB = 1 << 20
LEAK = 32 * MIB  # a third of a MiB a model: less than its weights
FLAGS = (
    "--enable_vmm_weights=true", "--enable_vmm_kvcache=true", "--vmm_elastic=true", "--block_size=16",
    "--dtype=float32", f"--max_cache_size={64 * MIB}",
)  # fmt: skip
ASKED = {"prompt": [7, 8, 9] * 30, "max_tokens": 12, "ignore_eos": True}


def path(checkpoint: str) -> str:
    return str(tiny_checkpoint(checkpoint))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    base = tmp_path_factory.mktemp("models")
    serving = Serving(base, tiny_checkpoint("llama"), *FLAGS, f"--vmm_neighbours_dir={base}")
    yield serving
    assert serving.stop() == 0 and "Traceback" not in serving.log.read_text(), serving.log.read_text()


def answer(server: Serving, model: str) -> str:
    said = server.complete(**ASKED, model=model)
    assert said["model"] == model
    return str(said["choices"][0]["text"])


def holds_what_it_says(server: Serving) -> None:
    """Once nothing is on its way back: the bytes of the pool as another process sees them."""
    memory = server.wait_until(lambda memory: memory["kv_spare"] == memory["free_handles"] == 0)
    assert server.memfd_bytes() == memory["physical"] > 0


def test_forks_answer_and_share(server: Serving) -> None:
    alone = answer(server, "llama")
    fork(server.http, path("qwen3"))
    before = server.vmm()["weights"]
    twin = fork(server.http, path("llama"), model_id="twin")
    assert server.vmm()["weights"] == before and twin["weights"] > 0
    assert answer(server, "twin") == answer(server, "llama") == alone != answer(server, "qwen3")
    holds_what_it_says(server)
    assert list(listed(server.http)) == ["llama", "qwen3", "twin"]


def test_one_sleeps_while_its_twin_serves(server: Serving) -> None:
    fork(server.http, path("llama"), model_id="twin")
    expected = answer(server, "llama")
    assert server.http.post("/sleep", json={"model_id": "twin", "master_status": 2}).json()["after"] == "deep"
    asked = {"prompt": "x", "model": "twin"}
    assert refused(server.http.post("/v1/completions", json=asked)) == (503, "model_sleeping")
    assert answer(server, "llama") == expected and listed(server.http)["twin"]["state"] == "deep"
    assert server.http.post("/wakeup", json={"model_id": "twin"}).json()["before"] == "deep"
    assert answer(server, "twin") == expected


def test_an_update_takes_what_is_in_the_folder(server: Serving) -> None:
    fork(server.http, path("llama"), model_id="updated")
    expected = answer(server, "updated")
    done = server.http.post("/update_weights", json={"model_id": "updated"})
    assert done.status_code == 200 and answer(server, "updated") == expected
    other = server.http.post("/update_weights", json={"model_id": "updated", "model_path": path("qwen3")})
    assert refused(other) == (400, "model_invalid") and answer(server, "updated") == expected


def test_an_update_brings_the_tokenizer_to_text_and_to_grammars(server: Serving, tmp_path: Path) -> None:
    def letters() -> str:
        asked = {"type": "regex", "regex": "a{4}"}
        said = server.complete(prompt="x", max_tokens=8, model="worded", response_format=asked)
        return str(said["choices"][0]["text"])

    fork(server.http, path("llama"), model_id="worded")
    assert letters() == "aaaa"
    other = tmp_path / "other words"
    shutil.copytree(path("llama"), other)
    words = json.loads((other / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(words))
    done = server.http.post("/update_weights", json={"model_id": "worded", "model_path": str(other)}).json()
    assert done["tokenizer"] == "exchanged" and letters() == "aaaa"
    assert server.http.delete("/v1/models/worded").json()["deleted"]


def test_paused_requests_run_at_last(server: Serving) -> None:
    fork(server.http, path("qwen3"))
    expected = answer(server, "qwen3")
    assert server.http.post("/pause", json={"model_id": "qwen3"}).json()["models"]["qwen3"]["after"] == "paused"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(answer, server, "qwen3")
        server.wait_until(lambda memory: server.metric("vllm:num_requests_waiting") == 1)
        assert answer(server, "llama") and not waiting.done()
        assert server.http.post("/resume", json={"model_id": "qwen3"}).json()["status"] == "running"
        assert waiting.result() == expected


def test_a_limit_of_one_model_is_its_own(server: Serving) -> None:
    fork(server.http, path("qwen3"))
    for model in ("llama", "qwen3"):
        answer(server, model)
    capped = server.http.post("/vmm/limit", json={"model_id": "qwen3", "bytes": 1}).json()
    assert (capped["model_id"], capped["limit"]) == ("qwen3", 1)
    assert server.vmm()["limit"] is None and answer(server, "llama")
    assert server.http.post("/vmm/limit", json={"model_id": "qwen3", "bytes": 0}).json()["limit"] is None
    assert answer(server, "qwen3")


def stream(server: Serving, model: str, tokens: int = 300) -> httpx.Response:
    body = {"prompt": "x", "model": model, "stream": True, "max_tokens": tokens, "ignore_eos": True}
    return server.http.post("/v1/completions", json=body)


@pytest.mark.parametrize("mode", ["refuse", "wait", "abort"])
def test_a_model_leaves_with_its_requests_or_after_them(server: Serving, mode: str) -> None:
    fork(server.http, path("qwen3"), model_id="leaves")
    before = server.vmm()["weights"]
    with ThreadPoolExecutor(1) as pool:
        streamed = pool.submit(stream, server, "leaves")
        server.wait_until(lambda memory: memory["models"]["leaves"]["kv_live"] > 0)
        done = server.http.delete(f"/v1/models/leaves?mode={mode}")
        assert refused(done) == (409, "model_busy") if mode == "refuse" else done.json()["deleted"]
        text = streamed.result().text
    assert ('"code":"model_not_found"' in text, '"finish_reason":"length"' in text) == (
        mode == "abort",
        mode != "abort",
    )
    assert text.endswith("data: [DONE]\n\n")
    if mode == "refuse":
        server.http.delete("/v1/models/leaves")
    assert server.http.post("/v1/completions", json={"prompt": "x", "model": "leaves"}).status_code == 404
    assert "leaves" not in listed(server.http) and "leaves" not in server.vmm()["models"]
    assert server.vmm()["weights"] <= before and answer(server, "llama")
    holds_what_it_says(server)


def test_a_model_in_another_ones_place(server: Serving) -> None:
    expected = answer(server, "llama")
    fork(server.http, path("qwen3"), model_id="place")
    other = answer(server, "place")
    assert server.http.delete("/v1/models/place").json()["freed"] > 0
    fork(server.http, path("llama"), model_id="place")
    assert answer(server, "place") == expected != other
    assert server.http.delete("/v1/models/place").json()["deleted"] and answer(server, "llama") == expected
    holds_what_it_says(server)


ORDERS = (
    ("/sleep", {"mode": "wait"}), ("/sleep", {"mode": "abort", "master_status": 2}), ("/sleep", {"park": True}),
    ("/wakeup", {}), ("/update_weights", {}), ("/vmm/trim", {}), ("/fork_master", {}), ("/v1/models", {"mode": "wait"}),
    ("/v1/models", {"mode": "abort"}),
)  # fmt: skip


def held_by(server: Serving) -> list[tuple[int, ...]]:
    """Of the API process and of the engine: threads, files, mappings, and bytes that only it has."""
    found = []
    api = psutil.Process(server.process.pid)
    for process in (api, *api.children(recursive=True)):
        mappings = len(process.memory_maps(grouped=False))
        found.append((process.num_threads(), process.num_fds(), mappings, process.memory_full_info().uss))
    return found


@pytest.mark.slow
def test_a_hundred_models_come_and_go(tmp_path: Path) -> None:
    serving = Serving(tmp_path, tiny_checkpoint("llama"), *FLAGS, f"--vmm_neighbours_dir={tmp_path}")
    guided = {"response_format": {"type": "regex", "regex": "a{3}"}, "prompt": "x"}

    def come_and_go(number: int) -> None:
        name = f"model-{number % 3}"
        fork(serving.http, path(("llama", "qwen3")[number % 2]), model_id=name)
        serving.complete(**(ASKED if number % 5 else guided), model=name)
        assert serving.http.delete(f"/v1/models/{name}").json()["deleted"]

    for number in range(20):
        come_and_go(number)
    holds_what_it_says(serving)
    before, series = held_by(serving), len(serving.http.get("/metrics").text.splitlines())
    for number in range(100):
        come_and_go(number)
    holds_what_it_says(serving)
    time.sleep(1)  # threads that are to end, and sockets
    for was, now in zip(before, held_by(serving), strict=True):
        assert now[0] <= was[0] + 1 and now[1] <= was[1] + 3 and now[2] <= was[2] + 40, (was, now)
        assert now[3] - was[3] < LEAK, (was, now)
    assert len(serving.http.get("/metrics").text.splitlines()) == series
    assert serving.stop() == 0 and "Traceback" not in serving.log.read_text()


@pytest.mark.slow
def test_orders_and_requests_at_random_change_no_answer(tmp_path: Path) -> None:
    seed = int(time.time())
    print(f"seed {seed}")
    paths = {"llama": path("llama"), "twin": path("llama"), "qwen3": path("qwen3")}
    flags = (*FLAGS, "--auto_wake=true", "--auto_sleep=true", f"--vmm_neighbours_dir={tmp_path}")
    serving = Serving(tmp_path, tiny_checkpoint("llama"), *flags)
    for name, folder in paths.items():
        fork(serving.http, folder, model_id=name)
    expected = {name: answer(serving, name) for name in paths}

    def client(number: int) -> None:
        chosen = random.Random(seed + number)
        for _ in range(40):
            name = chosen.choice(list(paths))
            got = serving.http.post("/v1/completions", json={**ASKED, "temperature": 0, "model": name})
            assert got.status_code in (404, 503) or got.json()["choices"][0]["text"] == expected[name], got.text
            order, body = chosen.choice(ORDERS)
            if order == "/v1/models":
                done = serving.http.request("DELETE", f"{order}/{name}", json=body)
            else:
                more = {"model_path": paths[name]} if order == "/fork_master" else {}
                done = serving.http.post(order, json={"model_id": name, **body, **more})
            assert done.status_code in (200, 404, 409, 503), (order, done.text)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(client, range(4)))
    for name, folder in paths.items():
        fork(serving.http, folder, model_id=name)
    assert {name: answer(serving, name) for name in paths} == expected
    holds_what_it_says(serving)
    assert serving.stop() == 0 and "Traceback" not in serving.log.read_text()
