"""Servers that a benchmark starts, watches and stops: each a child process running `xllm serve`.

Owns ports, log files and deadlines. Reads /health, /metrics and /vmm; knows nothing of loads.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xllm_cli.bench.load import Address
from xllm_cli.errors import XllmError

START_SECONDS = 300.0
STOP_SECONDS = 45.0
QUERY_SECONDS = 10.0
POLL_SECONDS = 0.05
LAUNCH = "from xllm_cli.cli import main; main()"

# what a benchmark reports of /metrics, as differences between two moments
COUNTERS = {
    "generated": "vllm:generation_tokens_total",
    "computed": "xllm:prompt_tokens_computed_total",
    "hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
    "pages_mapped": "xllm:vmm_pages_mapped_total",
    "pages_unmapped": "xllm:vmm_pages_unmapped_total",
    "map_seconds": "xllm:vmm_map_seconds_sum",
}


class ServerFailed(XllmError):
    """A server did not become ready or did not stop in time; the message ends with its log."""


class Server:
    """One `xllm serve` on loopback. Use it as a context manager: leaving stops it."""

    def __init__(
        self, flags: list[str], *, log: Path, within: Callable[[list[str]], list[str]] = lambda command: command
    ) -> None:
        """`within` makes the command that starts it somewhere of the command that starts it."""
        self.address = Address("127.0.0.1", _free_port())
        self.start_seconds = 0.0
        self._log = log
        listen = [f"--host={self.address.host}", f"--port={self.address.port}"]
        self._command = within([sys.executable, "-c", LAUNCH, "serve", *flags, *listen])

    def __enter__(self) -> Server:
        """Start and wait until ready; `start_seconds` is the time that took. Raises ServerFailed."""
        begin = time.perf_counter()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        try:
            self._wait_until_ready(begin + START_SECONDS)
        except BaseException:
            self._stop()
            raise
        self.start_seconds = time.perf_counter() - begin
        return self

    @property
    def pid(self) -> int:
        """The process that serves."""
        return self._process.pid

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _wait_until_ready(self, deadline: float) -> None:
        while not is_ready(self.address):
            if self._process.poll() is not None:
                raise ServerFailed(f"xllm serve ended with {self._process.returncode}:\n{self._tail()}")
            if time.perf_counter() > deadline:
                raise ServerFailed(f"xllm serve was not ready after {START_SECONDS:.0f} s:\n{self._tail()}")
            time.sleep(POLL_SECONDS)

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_SECONDS)

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-10:])


@contextmanager
def unwinding_on_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit in here, so that the servers that were started are stopped."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def is_ready(address: Address) -> bool:
    """Whether GET /health answers 200 now."""
    try:
        _get(address, "/health")
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return True


def counters(address: Address) -> dict[str, float]:
    """The COUNTERS of GET /metrics, summed over their labels."""
    totals = dict.fromkeys(COUNTERS, 0.0)
    for line in _get(address, "/metrics").decode().splitlines():
        series, _, value = line.rpartition(" ")
        for short, name in COUNTERS.items():
            if series.partition("{")[0] == name:
                totals[short] += float(value)
    return totals


def memory(address: Address) -> dict[str, Any]:
    """GET /vmm."""
    answer: dict[str, Any] = json.loads(_get(address, "/vmm"))
    return answer


def order(address: Address, path: str, body: dict[str, Any], seconds: float = QUERY_SECONDS) -> dict[str, Any]:
    """POST, such as an admin route's /vmm/limit; at most so many seconds."""
    answer: dict[str, Any] = json.loads(_get(address, path, json.dumps(body).encode(), seconds))
    return answer


def _get(address: Address, path: str, body: bytes | None = None, seconds: float = QUERY_SECONDS) -> bytes:
    with urllib.request.urlopen(f"http://{address.authority}{path}", body, timeout=seconds) as answer:
        content: bytes = answer.read()
    return content


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
