"""The life of a server from load to exit: readiness, drain, a dying engine, a stop while loading."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from scripted_server import Server, ask, error_of, open_stream, script, serving, streamed, wait_until, write_model

from xllm_cli.commands.client import Client, Unreachable

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
        health = httpx.get(f"{server.url}/health").json()
        assert health["phase"] == "weights" and health["seconds"] > 0.25
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
        assert server.process.wait(30) == 0
        lines = server.log.read_text().splitlines()
        assert sum("stopping: 2 requests are open" in line for line in lines) == 1 and "] stopped, " in lines[-1]
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
        assert server.process.wait(30) == 75
        assert server.text().rstrip().splitlines()[-1] == "error: rank 1 was lost"
        assert list(server.runtime.iterdir()) == []


def test_a_stop_while_loading_is_quick(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model, "--load_until", "/nonexistent") as server:
        server.wait_for("loading: weights")
        started = time.monotonic()
        server.process.terminate()
        assert server.process.wait(20) == 0
        assert time.monotonic() - started < 10  # a stop that waits for the load would take for ever
        assert list(server.runtime.iterdir()) == []


def engine_of(server: Server) -> psutil.Process:
    (engine,) = psutil.Process(server.process.pid).children()
    return engine


def test_an_engine_outlives_its_killed_server_by_seconds_at_most(tmp_path: Path, model: Path) -> None:
    """While it loads and in the middle of a stream; every other test's end kills an idle one. A hanging engine shows
    in /livez."""
    with serving(tmp_path, model, "--load_until", "/nonexistent") as server:
        server.wait_for("loading: weights")
        engine = engine_of(server)
        server.process.kill()
        engine.wait(30)
    (left,) = server.runtime.iterdir()
    with serving(tmp_path, model, liveness_timeout_secs=1) as server:
        server.wait_ready()
        assert not left.exists()  # swept
        stream = open_stream(server, script(endless=True, delay=0.01), stream=True)
        wait_until(lambda: server.gauge("vllm:num_requests_running") == 1)
        engine = engine_of(server)
        engine.suspend()
        wait_until(lambda: httpx.get(f"{server.url}/livez").status_code == 503)
        assert error_of(httpx.get(f"{server.url}/health_generate"))["code"] == "engine_stuck"
        engine.resume()
        assert httpx.get(f"{server.url}/health_generate").json() == {"status": "healthy"}
        wait_until(lambda: httpx.get(f"{server.url}/livez").status_code == 200)
        server.process.kill()
        engine.wait(30)
        stream.close()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    if shutil.which("openssl") is None:
        assert not os.environ.get("CI"), "openssl is missing"
        pytest.skip("openssl is not installed")
    path = tmp_path / "server.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", path, "-out", tmp_path / "certificate"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    path.write_bytes(path.read_bytes() + (tmp_path / "certificate").read_bytes())
    return path


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of a service manager that wants to hear every 0.2 s."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        monkeypatch.setenv("XLLM_API_KEY", "secret-environment")
        yield listener


def hear(listener: socket.socket, wanted: str) -> None:
    deadline = time.monotonic() + 30
    while wanted not in listener.recv(4096).decode():
        assert time.monotonic() < deadline, wanted


def test_a_service_with_tls_keys_and_a_killed_engine(
    tmp_path: Path, model: Path, certificate: Path, systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    flags = {"ssl_certfile": str(certificate), "api_key": "secret-flag", "pid_file": str(pid_file)}
    with serving(tmp_path, model, **flags) as server:
        hear(systemd, "STATUS=loading: ")
        hear(systemd, "READY=1")
        hear(systemd, "WATCHDOG=1")
        assert server.url.startswith("https://") and pid_file.read_text() == f"{server.process.pid}\n"
        engine = engine_of(server)
        assert " ".join(psutil.Process(server.process.pid).cmdline()).startswith("xllm serve [rank 0] :")
        assert not {"NOTIFY_SOCKET", "XLLM_API_KEY"} & engine.environ().keys()
        with pytest.raises(Unreachable, match=r"certificate is not trusted .* SSL_CERT_FILE"):
            Client(server.url).get("/health")
        with monkeypatch.context() as trusting:
            trusting.setenv("SSL_CERT_FILE", str(certificate))
            assert Client(server.url).get("/health").status == 200
        trust = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=server.url, verify=trust, headers={"authorization": "Bearer secret-flag"}) as http:
            assert httpx.get(f"{server.url}/health", verify=trust).status_code == 200
            assert httpx.get(f"{server.url}/v1/models", verify=trust).status_code == 401
            with ThreadPoolExecutor(1) as pool:
                stream = pool.submit(streamed, http, script(endless=True, delay=0.02))
                wait_until(lambda: http.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 1)
                engine.send_signal(signal.SIGKILL)
                assert (stream.result(30).error or {})["code"] == "engine_dead"
        assert server.process.wait(30) == 1
    assert "the engine was ended by SIGKILL" in server.text().splitlines()[-1]
    assert "secret" not in server.text() and not pid_file.exists() and not list(server.runtime.iterdir())
    assert "GET /v1/models 401" in server.text() and "GET /health" not in server.text()
