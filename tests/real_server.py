"""`xllm serve` in a subprocess on a real model, and what can be asked of it from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil


class Serving:
    """`xllm serve` in a subprocess, and what can be asked of it."""

    def __init__(
        self, folder: Path, model: Path, *flags: str, within: Callable[[list[str]], list[str]] = lambda command: command
    ) -> None:
        """`within` makes the command that starts it somewhere of the command that starts it."""
        self.log = folder / "serve.log"
        command = [sys.executable, "-m", "xllm_cli.cli", "serve", f"--model={model}", "--host=127.0.0.1", "--port=0"]
        with self.log.open("wb") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "2"}
            self.process = subprocess.Popen(within([*command, *flags]), stdout=log, stderr=log, env=environment)
        self.url = self.wait_for_line(r"xllm is ready on (http://[^:]+:\d+)")[1]
        self.http = httpx.Client(base_url=self.url, timeout=100, limits=httpx.Limits(max_connections=None))

    def wait_for_line(self, pattern: str, seconds: float = 100) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.log.read_text())):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return found

    def vmm(self) -> dict:
        return self.http.get("/vmm").json()

    def metric(self, name: str) -> float:
        text = self.http.get("/metrics").text
        return sum(float(v) for v in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def wait_until(self, condition: Callable[[dict], bool], seconds: float = 20) -> dict:
        deadline = time.monotonic() + seconds
        while not condition(memory := self.vmm()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return memory

    def memfd_bytes(self) -> int:
        """Bytes really allocated in the memfds of the server's processes."""
        total = 0
        for process in psutil.Process(self.process.pid).children(recursive=True):
            for fd in Path(f"/proc/{process.pid}/fd").iterdir():
                if "/memfd:" in os.readlink(fd):
                    total += os.stat(fd).st_blocks * 512
        return total

    def complete(self, **body: object) -> dict:
        wanted = {"temperature": 0, **body}
        answer = self.http.post("/v1/completions", json=wanted)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stop(self) -> int:
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        """The sudden death of the whole server: the process that serves, and with it its engine."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.http.close()
        self.process.kill()
        self.process.wait(30)
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, "the engine outlived its server"
