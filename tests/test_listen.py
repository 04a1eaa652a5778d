"""Binding before anything slow: who holds the port, which addresses, and no sharing."""

from __future__ import annotations

import os
import socket

import pytest

from xllm_cli.errors import BindError
from xllm_cli.server.listen import is_beyond_loopback, listen, urls


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
