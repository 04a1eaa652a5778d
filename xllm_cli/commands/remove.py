"""`xllm remove`: take a model out of a running server."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import click

from xllm_cli.commands.asking import WAIT_SECONDS, asks, moved, names_model, said
from xllm_cli.commands.client import Client, api_key

MODES = click.Choice(["refuse", "wait", "abort"])


@click.command()
@names_model
@click.option("--mode", type=MODES, default="refuse", show_default=True, help="What becomes of open requests.")
@asks
def command(*, model_id: str | None, mode: str, url: str, api_key_file: Path | None) -> None:
    """Take MODEL out of a server, with all that it holds.

    Any but the first: that one stays, `xllm sleep` gives its memory to others.
    """
    if not model_id:
        raise click.UsageError("name the MODEL to remove; `xllm models` lists them")
    client = Client(url, api_key(api_key_file), timeout=WAIT_SECONDS)
    path = f"/v1/models/{quote(model_id)}"
    done = said(client, path, client.delete(f"{path}?mode={mode}"))
    click.echo(moved(done, "freed"))
    if "message" in done:
        click.echo(done["message"])
