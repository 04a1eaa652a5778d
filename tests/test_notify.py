"""Datagrams to systemd, or to whoever listens in its place."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from xllm_cli.server.notify import Notifier


@pytest.mark.parametrize("is_abstract", [False, True])
def test_states_reach_the_socket_and_the_variables_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_abstract: bool
) -> None:
    name = f"xllm-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name if is_abstract else name)
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if is_abstract else name)
        monkeypatch.setenv("WATCHDOG_USEC", "3000000")
        notifier = Notifier()
        notifier.send("READY=1")
        assert listener.recv(100) == b"READY=1"
    assert notifier.watchdog_seconds == 3.0 and "NOTIFY_SOCKET" not in os.environ
    notifier.send("STOPPING=1")  # nobody is there any more


@pytest.mark.parametrize(("usec", "pid"), [("", ""), ("x", ""), ("0", ""), ("1000000", "1")])
def test_a_watchdog_that_is_not_ours_is_not_fed(monkeypatch: pytest.MonkeyPatch, usec: str, pid: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.setenv("WATCHDOG_PID", pid)
    assert Notifier().watchdog_seconds is None


def test_without_a_socket_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    notifier = Notifier()
    notifier.send("READY=1")
    assert notifier.watchdog_seconds is None
