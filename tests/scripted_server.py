"""`xllm serve` over the scripted engine: a model folder, a server in a subprocess, and clients of it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import tokenizers
from stream_grammar import Stream, check_stream
from tokenizers import decoders, models, pre_tokenizers

from xllm_cli.flags import FLAGS

ROOT = Path(__file__).parents[1]
SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'cow' %}{{ raise_exception('no cows') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A folder with config and a tokenizer of one token per byte; ids 256 … 260 are the special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": SPECIAL[0], "eos_token": {"content": SPECIAL[1]}, "pad_token": None}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"architectures": ["Scripted"], "eos_token_id": 257}))
    return folder


class Server:
    """A running server. `lines` is what it has said so far; `url` the first one it announced."""

    def __init__(self, folder: Path, model: Path, engine: tuple[str, ...], flags: dict[str, Any]) -> None:
        self.log = folder / "server.log"
        self.runtime = folder / "run"
        self.runtime.mkdir(mode=0o700, exist_ok=True)
        config: dict[str, dict[str, Any]] = {}
        for name, value in {"host": "127.0.0.1", "port": 0, "model": str(model), **flags}.items():
            config.setdefault(FLAGS[name].section, {})[name] = value
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(config), *engine],
                stdout=log, stderr=log, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "XDG_RUNTIME_DIR": str(self.runtime)},
            )  # fmt: skip
        self.url = self.wait_for(r"listening on (https?://\S+?);?( |$)")[1]

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        """The first match in what the server says; fails when it ends or says nothing of the kind in time."""
        deadline = time.monotonic() + seconds
        while (match := re.search(pattern, self.text(), re.MULTILINE)) is None:
            ended = self.process.poll() is not None and re.search(pattern, self.text(), re.MULTILINE) is None
            assert not ended and time.monotonic() < deadline, f"no {pattern!r} in:\n{self.text()}"
            time.sleep(0.01)
        return match

    def wait_ready(self) -> Server:
        self.wait_for("^xllm is ready on")
        return self

    def gauge(self, name: str) -> float:
        """A value of /metrics by the beginning of its line."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return float(next(line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(name)))

    def wait_idle(self, seconds: float = 30) -> None:
        """Until the engine runs nothing and no HTTP request is open."""
        deadline = time.monotonic() + seconds
        while self.gauge("vllm:num_requests_running") or self.gauge("xllm:open_http_requests"):
            assert time.monotonic() < deadline, "requests are still running"
            time.sleep(0.02)

    def close(self) -> None:
        """Kill the server if it runs; its engine must end by itself."""
        children = psutil.Process(self.process.pid).children() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait(30)
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, "the engine outlived its server"


@contextmanager
def serving(folder: Path, model: Path, *engine: str, **flags: Any) -> Iterator[Server]:
    """A server over the scripted engine with extra engine arguments and flags; killed at the end."""
    server = Server(folder, model, engine, flags)
    try:
        yield server
    finally:
        server.close()


def script(**script: Any) -> str:
    return json.dumps(script)


def ask(http: httpx.Client, prompt: Any, *, chat: bool = False, **fields: Any) -> httpx.Response:
    fields.setdefault("max_tokens", 100)
    if chat:
        messages = [{"role": "user", "content": prompt}]
        return http.post("/v1/chat/completions", json={"messages": messages, **fields})
    return http.post("/v1/completions", json={"prompt": prompt, **fields})


def streamed(http: httpx.Client, prompt: Any, *, chat: bool = False, **fields: Any) -> Stream:
    answer = ask(http, prompt, chat=chat, stream=True, **fields)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    usage = bool((fields.get("stream_options") or {}).get("include_usage"))
    return check_stream(answer.text, chat=chat, include_usage=usage)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def open_stream(server: Server, prompt: str, **fields: Any) -> socket.socket:
    """A raw connection with a request on it, so that the test can go away as rudely as it likes."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": prompt, "max_tokens": 100, **fields}).encode()
    connection = socket.create_connection((host, int(port)), timeout=30)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


if __name__ == "__main__":
    from xllm_cli.flags import Config
    from xllm_cli.server.run import run

    command = (sys.executable, str(ROOT / "tests" / "scripted_engine.py"), *sys.argv[2:])
    sys.exit(run(Config.model_validate(json.loads(sys.argv[1])), command))
