"""Faults of servers whose models sleep, as their users see them: from outside, in bytes that the machine counts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from checkpoints import tiny_checkpoint
from real_server import Serving
from several_models import fork, listed, refused

from xllm_cli.bench import wide_model
from xllm_cli.bench.memory_watch import held_bytes, memfd_bytes

MIB = 1 << 20
FLAGS = ("--enable_vmm_weights=true", "--enable_vmm_kvcache=true", "--vmm_elastic=true", "--dtype=float32")
NOISE = 16 * MIB  # threads, caches of the C library
ASKED = {"prompt": [1, 2, 3] * 40, "max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server whose weights are most of what it holds."""
    folder = tmp_path_factory.mktemp("heavy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide_model, "NETWORK", 1 << 16)
        model = wide_model.make_wide_model(folder / "model")
    serving = Serving(folder, model, *FLAGS, f"--vmm_neighbours_dir={folder}")
    yield serving
    assert serving.stop() == 0 and "Traceback" not in serving.log.read_text(), serving.log.read_text()


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server of tiny models."""
    folder = tmp_path_factory.mktemp("several")
    serving = Serving(folder, tiny_checkpoint("llama"), *FLAGS, "--block_size=16", f"--vmm_neighbours_dir={folder}")
    yield serving
    assert serving.stop() == 0 and "Traceback" not in serving.log.read_text(), serving.log.read_text()


def held(server: Serving) -> int:
    """What the server's processes hold, once what was only kept for a moment has left."""
    server.http.post("/vmm/trim", json={})
    server.wait_until(lambda memory: memory["kv_spare"] == memory["free_handles"] == 0)
    return held_bytes(server.process.pid)


def test_weights_are_in_memory_once(heavy: Serving, several: Serving) -> None:
    """What a server holds besides its pages is the same for a large model as for a tiny one, awake and asleep."""
    pages, weights = heavy.vmm()["physical"], heavy.vmm()["weights"]
    assert weights > 3 * NOISE and held(heavy) - pages <= held(several) - several.vmm()["physical"] + 2 * NOISE


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeper_has_no_second_copy_and_a_cycle_leaves_nothing(heavy: Serving, level: int) -> None:
    expected = heavy.complete(**ASKED)["choices"][0]["text"]
    weights, awake = heavy.vmm()["weights"], held(heavy)
    assert weights > 4 * NOISE
    for _ in range(2):
        answer = heavy.http.post("/sleep", json={"master_status": level}).json()
        assert memfd_bytes(heavy.process.pid) == 0 and answer["freed"] >= weights
        assert held(heavy) <= awake - weights + NOISE, "its bytes are somewhere else"
        heavy.http.post("/wakeup", json={})
        assert heavy.complete(**ASKED)["choices"][0]["text"] == expected
        assert held(heavy) <= awake + NOISE


def is_held(card: dict[str, Any]) -> bool:
    """An order about it has come."""
    return bool(card["is_paused"]) or card["state"] == "falling asleep"


@pytest.mark.parametrize("order", ["/pause", "/sleep"])
def test_what_waits_for_a_models_requests_is_told_that_it_was_removed(several: Serving, order: str) -> None:
    fork(several.http, str(tiny_checkpoint("qwen3")), model_id="leaves")
    asked = {"model": "leaves", "prompt": [5] * 30, "max_tokens": 450, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(several.http.post, "/v1/completions", json=asked)
        several.wait_until(lambda memory: memory["models"]["leaves"]["kv_live"] > 0)
        waiting = pool.submit(several.http.post, order, json={"mode": "wait", "model_id": "leaves"})
        several.wait_until(lambda _: is_held(listed(several.http)["leaves"]))
        gone = several.http.request("DELETE", "/v1/models/leaves", params={"mode": "abort"})
        assert gone.status_code == 200, gone.text
        for answer in (running.result(60), waiting.result(60)):
            assert answer.status_code == 200 or refused(answer) == (404, "model_not_found"), answer.text
