"""The life of a server from load to exit: readiness, drain, a dying engine, a stop while loading."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from scripted_server import ask, error_of, script, serving, streamed, wait_until, write_model

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def test_a_stop_drains_and_leftover_streams_get_an_error(tmp_path: Path, model: Path) -> None:
    loaded = tmp_path / "loaded"
    with serving(tmp_path, model, "--load_until", str(loaded), shutdown_timeout_secs=1.5) as server:
        health = httpx.get(f"{server.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert error_of(httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}))["code"] == "model_loading"
        server.wait_for("loading: weights")
        assert httpx.get(f"{server.url}/health").json()["phase"] == "weights"
        assert server.gauge("vllm:generation_tokens_total") == 0
        loaded.touch()
        server.wait_ready()
        with ThreadPoolExecutor(2) as pool, httpx.Client(base_url=server.url, timeout=20) as http:
            short = pool.submit(streamed, http, script(say="x" * 10, delay=0.08))
            endless = pool.submit(streamed, http, script(endless=True, delay=0.05))
            wait_until(lambda: server.gauge("vllm:num_requests_running") == 2)
            server.process.terminate()
            wait_until(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
            assert error_of(ask(http, "late"))["code"] == "shutting_down"
            assert short.result().choices[0].text == "x" * 10
            assert (endless.result().error or {})["code"] == "shutting_down"
        assert server.process.wait(5) == 0
        assert list(server.runtime.iterdir()) == []


def test_streams_learn_that_the_engine_died(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model) as server:
        server.wait_ready()
        with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url, timeout=20) as http:
            other = pool.submit(streamed, http, script(endless=True, delay=0.05))
            wait_until(lambda: server.gauge("vllm:num_requests_running") == 1)
            stream = streamed(http, script(say="hello", at=2, die=75))
            assert stream.choices[0].text == "he" and (stream.error or {})["code"] == "engine_dead"
            assert (other.result().error or {})["code"] == "engine_dead"
        assert server.process.wait(5) == 75
        assert server.text().rstrip().splitlines()[-1] == "error: rank 1 was lost"
        assert list(server.runtime.iterdir()) == []


def test_a_stop_while_loading_is_quick(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model, "--load_until", "/nonexistent") as server:
        server.wait_for("loading: weights")
        started = time.monotonic()
        server.process.terminate()
        assert server.process.wait(5) == 0
        assert time.monotonic() - started < 2
        assert list(server.runtime.iterdir()) == []
