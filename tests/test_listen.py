"""Binding before anything slow: who holds the port, which addresses, and no sharing."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from xllm_cli.errors import BindError, ConfigError
from xllm_cli.flags import SecurityConfig
from xllm_cli.server.listen import check_certificate, is_beyond_loopback, listen, urls
from xllm_cli.server.origins import allowed_origins


def test_a_free_port_is_picked_and_named() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert urls(listener) == [f"http://127.0.0.1:{port}"]
        assert not is_beyond_loopback(listener)
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_taken_port_names_its_holder(host: str) -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(BindError, match=rf":{port}: it is in use by process {os.getpid()}") as caught:
            listen(host, port)
        assert caught.value.exit_code == 3


def test_a_port_in_time_wait_is_free() -> None:
    with listen("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        client = socket.create_connection(address, timeout=5)
        listener.setblocking(True)
        accepted, _ = listener.accept()
        accepted.close()  # this side closes first and keeps the state
        client.close()
    listen(*address).close()


def test_an_empty_host_is_all_interfaces() -> None:
    with listen("", 0) as listener:
        assert is_beyond_loopback(listener)
        assert urls(listener)[0] == f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_ours_is_an_error(host: str) -> None:
    with pytest.raises(BindError, match=host):
        listen(host, 0)


def test_a_certificate_that_cannot_be_used_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "notes.pem").write_text("dear diary")
    check_certificate(SecurityConfig())
    for certificate, key in (("", "k.pem"), ("missing.pem", ""), ("notes.pem", ""), ("notes.pem", "missing.pem")):
        flags = {"ssl_certfile": certificate and str(tmp_path / certificate), "ssl_keyfile": key}
        with pytest.raises(ConfigError, match="--ssl_") as caught:
            check_certificate(SecurityConfig(**flags))
        assert caught.value.exit_code == 2


def test_urls_name_the_scheme() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert urls(listener, "server.pem")[0].startswith("https://127.0.0.1:")


def test_origins_are_those_a_browser_sends() -> None:
    assert allowed_origins(SecurityConfig()) == []
    asked = "*, http://localhost:3000/,https://a.example,chrome-extension://abc"
    assert allowed_origins(SecurityConfig(allowed_origins=asked)) == [
        "*", "http://localhost:3000", "https://a.example", "chrome-extension://abc",
    ]  # fmt: skip
    for wrong in ("a.example", "https://a.example/path", "https:// a"):
        with pytest.raises(ConfigError, match="no origin"):
            allowed_origins(SecurityConfig(allowed_origins=wrong))
