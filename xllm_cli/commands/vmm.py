"""`xllm vmm show|limit|trim`: the memory of running engines, seen and changed from outside.

`show` reads the status files of this user's engines and needs no server to answer; `limit` and `trim` ask one server.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import msgspec

from xllm_cli.commands.asking import STEP_SECONDS, asks, order, size, table
from xllm_cli.commands.client import Client, api_key
from xllm_cli.declare import parse_bytes
from xllm_cli.neighbours.folder import device_folders
from xllm_cli.neighbours.status import Status, read_statuses

COLUMNS = (
    "MODEL",
    "DEVICE",
    "PID",
    "PHYSICAL",
    "LIVE",
    "CACHED",
    "SPARE",
    "LIMIT",
    "FREE",
    "RUNNING",
    "WAITING",
    "AGE",
)
MODEL = "Only this model's; by default that of all together."


class Bytes(click.ParamType[int]):
    """A number of bytes with an optional suffix."""

    name = "BYTES"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; a usage error for what is none or negative."""
        try:
            nbytes = parse_bytes(str(value))
        except ValueError:
            nbytes = -1
        if nbytes < 0:
            self.fail(f"{value!r} is not a number of bytes; write 1073741824 or 1GiB", param, ctx)
        return nbytes


@click.group()
def command() -> None:
    """See, limit or trim the memory of running engines."""


@command.command()
@click.option("--dir", "base", default="", help="The engines' --vmm_neighbours_dir, if they have one.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object an engine, a line each.")
def show(base: str, as_json: bool) -> None:
    """All engines of this user on this machine, by device."""
    statuses = [status for folder in device_folders(base) for status in read_statuses(folder)]
    if as_json:
        for status in statuses:
            click.echo(msgspec.json.encode(msgspec.structs.asdict(status)).decode())
    elif statuses:
        click.echo(table([COLUMNS, *(_cells(status) for status in statuses)]))
    else:
        click.echo("no engine of this user is running")


@command.command()
@click.argument("nbytes", metavar="BYTES", type=Bytes())
@click.option("--model_id", default=None, metavar="MODEL", help=MODEL)
@asks
def limit(nbytes: int, model_id: str | None, url: str, api_key_file: Path | None) -> None:
    """Cap a server's KV cache at BYTES from now on.

    BYTES may have a suffix, as in 256MiB or 2G; 0 lifts the cap.
    """
    client = Client(url, api_key(api_key_file), timeout=STEP_SECONDS)
    _post(client, "/vmm/limit", {"bytes": nbytes, "model_id": model_id})


@command.command()
@click.argument("nbytes", metavar="[BYTES]", type=Bytes(), required=False)
@click.option("--model_id", default=None, metavar="MODEL", help=MODEL)
@asks
def trim(nbytes: int | None, model_id: str | None, url: str, api_key_file: Path | None) -> None:
    """Have a server give unused BYTES back.

    Idle prefixes and spares go, all of them if BYTES are left out.
    """
    client = Client(url, api_key(api_key_file), timeout=STEP_SECONDS)
    _post(client, "/vmm/trim", {"bytes": nbytes, "model_id": model_id})


def _post(client: Client, path: str, body: dict[str, Any]) -> None:
    done = order(client, path, body)
    capped = "no limit" if done["limit"] is None else f"limit {size(done['limit'])}"
    click.echo(
        f"freed {size(done['freed'])} in {done['milliseconds']:.1f} ms; "
        f"{size(done['mapped'])} mapped, {size(done['physical'])} physical, {capped}"
    )


def _cells(status: Status) -> tuple[str, ...]:
    sizes = (status.physical, status.kv_live, status.kv_cached, status.kv_spare, status.limit, status.free)
    return (
        status.model_id,
        status.device,
        str(status.pid),
        *("-" if nbytes is None else size(nbytes) for nbytes in sizes),
        str(status.running),
        str(status.waiting),
        f"{max(0.0, time.monotonic() - status.written_at):.1f}s",
    )
