"""`xllm check` against a server that is well, one that loads, one that wants a key, and ones that are none."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_server import Server, serving, write_model

from xllm_cli.cli import main
from xllm_cli.commands.client import Client, Unreachable, api_key
from xllm_cli.errors import ConfigError

NAMES = ["health", "liveness", "readiness", "models", "completion", "streaming", "vmm", "metrics"]


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLLM_API_KEY", raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), model, api_key="secret") as running:
        yield running.wait_ready()


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["check", *arguments])
    return int(str(ended.value.code)), capsys.readouterr().out


@pytest.mark.server
def test_a_server_that_is_well(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\n\nsecret\nother\n")
    code, text = check(capsys, server.url.removeprefix("http://"), f"--api_key_file={tmp_path / 'keys'}")
    lines = text.splitlines()
    assert code == 0 and [line.split()[:2] for line in lines[:-1]] == [["ok", name] for name in NAMES]
    assert lines[-1] == f"{server.url}: all is well" and "secret" not in text


@pytest.mark.server
def test_as_json(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLLM_API_KEY", "secret,other")
    code, text = check(capsys, f"{server.url}/v1", "--json")
    report = json.loads(text)
    assert code == 0 and report["ok"] is True and report["url"] == server.url
    assert [one["name"] for one in report["checks"]] == NAMES
    assert all(one["ok"] and one["ms"] >= 0 and one["detail"] for one in report["checks"])


@pytest.mark.server
def test_a_missing_key_is_named(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(capsys, server.url)
    assert code == 1 and "ok    health" in text and "FAIL  completion" in text
    assert text.count("--api_key_file=FILE") == 5
    assert text.splitlines()[-1] == f"{server.url}: 5 of 8 checks failed"


@pytest.mark.server
def test_a_server_that_loads_is_not_well(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model, "--load_until", "/nonexistent") as server:
        server.wait_for("loading: weights")
        code, text = check(capsys, server.url)
    assert code == 1 and "ok    liveness" in text
    assert "FAIL  health" in text and '"phase":"weights"' in text and "model_loading" in text


def test_where_nobody_listens_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    code, text = check(capsys, f"http://127.0.0.1:{port}")
    assert code == 1 and text.count("FAIL") == 1 and "Connection refused" in text


class Liar(http.server.BaseHTTPRequestHandler):
    """Answers everything with 200 and what nobody wants to hear."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = {"/v1/models": b'{"data": []}', "/vmm": b'{"mapped": 1}', "/livez": b"[]"}.get(self.path, b"hello")
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815  names that http.server asks for

    def log_message(self, *arguments: object) -> None:
        """Silence."""


@pytest.fixture
def liar() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar) as liar:
        thread = threading.Thread(target=liar.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{liar.server_port}"
        liar.shutdown()
        thread.join(10)


def test_answers_that_are_none_are_not_believed(liar: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(capsys, liar)
    assert code == 1 and text.splitlines()[-1] == f"{liar}: 8 of 8 checks failed"
    for words in ("no JSON: hello", "no JSON object", "no model is listed", "'kv_live' is missing", "of xllm"):
        assert words in text


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h:port", ":8010"])
def test_what_is_no_address(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no address of a server"):
        Client(url)
    with pytest.raises(SystemExit) as ended:
        main(["check", url])
    assert ended.value.code == 2


def test_silence_and_noise_are_no_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(Unreachable, match=r"did not answer within 0\.2 s"):
            Client(silent_url, timeout=0.2).get("/health")
        assert time.monotonic() - started < 10
        threading.Thread(target=_greet, args=(silent,)).start()
        with pytest.raises(Unreachable, match="does not speak HTTP"):
            Client(silent_url, timeout=5).get("/health")
        with pytest.raises(Unreachable, match="cannot be reached"):
            Client("http://no.such.host.invalid").get("/")


def _greet(listener: socket.socket) -> None:
    for _ in range(2):  # the first is of the client that has gone
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"220 mail.example ESMTP\r\n")


def test_keys_come_from_the_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert api_key(None) == ""
    monkeypatch.setenv("XLLM_API_KEY", " one ,two")
    assert api_key(None) == "one"
    (tmp_path / "empty").write_text("# none\n")
    for file in (tmp_path / "empty", tmp_path / "none"):
        with pytest.raises(ConfigError, match=f"--api_key_file={file}"):
            api_key(file)
