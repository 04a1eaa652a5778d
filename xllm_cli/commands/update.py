"""`xllm update`: have a running server exchange a model's weights."""

from __future__ import annotations

import os
from pathlib import Path

import click

from xllm_cli.commands.asking import MOVE_SECONDS, asks, moved, names_model, order
from xllm_cli.commands.client import Client, api_key

FOLDER = "Where the new weights are, on the server's machine; by default where the old ones came from."


@click.command()
@names_model
@click.option("--path", type=click.Path(file_okay=False), help=FOLDER)
@asks
def command(*, model_id: str | None, path: str | None, url: str, api_key_file: Path | None) -> None:
    """Exchange the weights of a server's MODEL between two steps: requests go on with the new ones."""
    body = {"model_id": model_id, "model_path": os.path.abspath(path) if path else None}
    client = Client(url, api_key(api_key_file), timeout=MOVE_SECONDS)
    click.echo(moved(order(client, "/update_weights", body), "taken"))
