"""`xllm check URL`: does a running server do what it is for? Asks as a client and as an orchestrator would."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from xllm_cli.commands.client import DEFAULT_URL, Answer, Client, Unreachable, api_key

PROMPT = "Hello"
_NO_KEY = "401: the server needs an API key: --api_key_file=FILE or XLLM_API_KEY"


class Check(NamedTuple):
    """What one question brought. `seconds` is how long its answer took; of a stream, its first event."""

    name: str
    is_good: bool
    seconds: float
    detail: str


class Wrong(Exception):
    """The answer is not what it should be; the message says what it is."""


def run_checks(client: Client) -> list[Check]:
    """All checks in order. When nobody answers the first one, there is only that one."""
    seen = Seen(client)
    checks = []
    for name, ask in seen.questions().items():
        started = time.monotonic()
        try:
            seconds, detail = ask()
            checks.append(Check(name, True, seconds, detail))
        except (Wrong, Unreachable) as error:
            checks.append(Check(name, False, time.monotonic() - started, str(error)))
            if isinstance(error, Unreachable) and len(checks) == 1:
                break
    return checks


class Seen:
    """The questions, and the name of the model once it is known."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._model = ""

    def questions(self) -> dict[str, Callable[[], tuple[float, str]]]:
        """By name, in order: each returns seconds and a detail, or raises Wrong or Unreachable."""
        return {
            "health": lambda: self._probe("/health"),
            "liveness": lambda: self._probe("/livez"),
            "readiness": lambda: self._probe("/readyz"),
            "models": self._models,
            "completion": self._completion,
            "streaming": self._streaming,
            "vmm": self._memory,
            "metrics": self._metrics,
        }

    def _probe(self, path: str) -> tuple[float, str]:
        answer = _good(self._client.get(path))
        return answer.seconds, str(_object(answer).get("status", "answers"))

    def _models(self) -> tuple[float, str]:
        answer = _good(self._client.get("/v1/models"))
        data = _object(answer).get("data")
        names = [card["id"] for card in data if isinstance(card, dict) and "id" in card] if data else []
        if not names:
            raise Wrong("no model is listed")
        self._model = names[0]
        return answer.seconds, ", ".join(names)

    def _completion(self) -> tuple[float, str]:
        answer = _good(self._client.post("/v1/completions", self._body()))
        body = _object(answer)
        if not body.get("choices") or "text" not in body["choices"][0]:
            raise Wrong(f"no choice in {_short(answer.body)}")
        return answer.seconds, f"{body.get('usage', {}).get('completion_tokens', '?')} tokens: {PROMPT!r} goes on"

    def _streaming(self) -> tuple[float, str]:
        try:
            events = list(self._client.events("/v1/completions", {**self._body(), "stream": True}))
        except ValueError as error:
            raise Wrong(_NO_KEY if str(error).startswith("401:") else str(error)) from error
        if not events or events[-1][1] != "[DONE]":
            raise Wrong(f"the stream of {len(events)} events does not end with [DONE]")
        if any('"error"' in data for _, data in events):
            raise Wrong(next(data for _, data in events if '"error"' in data))
        return events[0][0], f"{len(events) - 1} events, the first after {events[0][0]:.3f} s, [DONE]"

    def _memory(self) -> tuple[float, str]:
        answer = _good(self._client.get("/vmm"))
        report = _object(answer)
        try:
            parts = sum(report[name] for name in ("kv_live", "kv_cached", "kv_idle", "kv_spare", "weights"))
            mapped, possible = report["mapped"], report["possible"]
        except KeyError as error:
            raise Wrong(f"{error} is missing") from error
        if parts != mapped:
            raise Wrong(f"{mapped} bytes are mapped, but its parts are {parts}")
        text = f"{report['device']} {report['mode']}: {_mebibytes(mapped)} mapped, {_mebibytes(possible)} possible"
        return answer.seconds, text

    def _metrics(self) -> tuple[float, str]:
        answer = _good(self._client.get("/metrics"))
        lines = [line for line in answer.body.decode("utf-8", "replace").splitlines() if line[:1] not in ("", "#")]
        if not any(line.startswith("xllm:") for line in lines):
            raise Wrong(f"none of {len(lines)} samples is one of xllm")
        return answer.seconds, f"{len(lines)} samples"

    def _body(self) -> dict[str, Any]:
        named = {"model": self._model} if self._model else {}
        return {**named, "prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def _good(answer: Answer) -> Answer:
    if answer.status == 401:
        raise Wrong(_NO_KEY)
    if answer.status != 200:
        raise Wrong(f"{answer.status}: {_short(answer.body)}")
    return answer


def _object(answer: Answer) -> dict[str, Any]:
    try:
        body = answer.json()
    except ValueError as error:
        raise Wrong(f"no JSON: {_short(answer.body)}") from error
    if not isinstance(body, dict):
        raise Wrong(f"no JSON object: {_short(answer.body)}")
    return body


def _short(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    return text if len(text) <= 300 else f"{text[:300]}…"


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:.0f} MiB"


@click.command()
@click.argument("url", default=DEFAULT_URL)
@click.option(
    "--api_key_file", type=click.Path(dir_okay=False, path_type=Path), help="File of the key; else XLLM_API_KEY."
)
@click.option("--timeout", default=30.0, show_default=True, type=click.FloatRange(0, min_open=True), metavar="SECONDS")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def command(url: str, api_key_file: Path | None, timeout: float, as_json: bool) -> int:
    """Ask a running server everything once: 0 if all is well, else 1."""
    client = Client(url, api_key(api_key_file), timeout=timeout)
    checks = run_checks(client)
    failed = [check for check in checks if not check.is_good]
    if as_json:
        entries = [
            {"name": one.name, "ok": one.is_good, "ms": round(1000 * one.seconds, 1), "detail": one.detail}
            for one in checks
        ]
        click.echo(json.dumps({"url": client.url, "ok": not failed, "checks": entries}, indent=2))
        return int(bool(failed))
    for one in checks:
        mark = "ok  " if one.is_good else "FAIL"
        click.echo(f"{mark}  {one.name:<10} {1000 * one.seconds:>8.1f} ms  {one.detail}")
    click.echo(f"{client.url}: " + (f"{len(failed)} of {len(checks)} checks failed" if failed else "all is well"))
    return int(bool(failed))
