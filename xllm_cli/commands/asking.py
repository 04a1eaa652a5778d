"""What the commands that ask a running server share: their options, and an order that is carried out or is an error."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from xllm_cli.commands.client import DEFAULT_URL, Answer, Client
from xllm_cli.errors import ConfigError, XllmError

Function = TypeVar("Function", bound=Callable[..., Any])
STEP_SECONDS = 60.0  # each above what the server itself waits for its engine
MOVE_SECONDS = 660.0
WAIT_SECONDS = 24 * 3600.0 + 60


def asks(function: Function) -> Function:
    """The options of a command that asks a server."""
    file = click.Path(dir_okay=False, path_type=Path)
    key = click.option("--api_key_file", type=file, help="File of the key; else XLLM_API_KEY.")
    url = click.option("--url", default=DEFAULT_URL, show_default=True, help="The server to ask.")
    return url(key(function))


def names_model(function: Callable[..., Any]) -> Callable[..., Any]:
    """MODEL, or --model_id as the HTTP field is called; neither is the server's first. The command gets `model_id`."""

    @functools.wraps(function)
    def named(*, model: str | None, also: str | None, **options: Any) -> Any:
        if model and also and model != also:
            raise click.UsageError(f"{model} and --model_id={also} are two models; name one")
        return function(model_id=model or also, **options)

    argument = click.argument("model", required=False)
    return argument(click.option("--model_id", "also", metavar="MODEL", help="The same as MODEL.")(named))


def moved(done: dict[str, Any], *kinds: str) -> str:
    """A transition in one line; `kinds`: what is told of the bytes."""
    sizes = ", ".join([*(f"{kind} {size(done[kind])}" for kind in kinds), f"{size(done['physical'])} physical"])
    return f"{done['model_id']}: {done['before']} → {done['after']} in {done['milliseconds']:.1f} ms; {sizes}"


def order(client: Client, path: str, body: dict[str, Any]) -> Any:
    """POST; what the server says. ConfigError for what can never be, XllmError for what cannot be now."""
    return said(client, path, client.post(path, body))


def said(client: Client, path: str, answer: Answer) -> Any:
    """The JSON of a good answer; an error with the server's own words for any other."""
    if answer.status == 200:
        return answer.json()
    kind = ConfigError if answer.status == 400 else XllmError
    raise kind(f"{client.url}{path}: {answer.status}: {_message(answer)}")


def _message(answer: Answer) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return answer.body[:200].decode("utf-8", "replace")


def size(nbytes: int) -> str:
    """Bytes as people read them."""
    return f"{nbytes / 2**20:.1f}MiB"


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows under each other in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (zip(row, widths, strict=True) for row in rows)
    return "\n".join("  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in lines)
