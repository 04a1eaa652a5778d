"""`xllm fork`: have a running server serve one more model, over the same memory."""

from __future__ import annotations

import os
from pathlib import Path

import click

from xllm_cli.commands.asking import MOVE_SECONDS, asks, moved, order
from xllm_cli.commands.client import Client, api_key

NAME = "What requests will call it; by default the folder's name."
LEVEL = "0 serves at once; 1 and 2 leave it asleep, as `xllm sleep` does."


@click.command()
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--model_id", default=None, help=NAME)
@click.option("--level", type=click.IntRange(0, 2), default=0, show_default=True, help=LEVEL)
@asks
def command(*, folder: str, model_id: str | None, level: int, url: str, api_key_file: Path | None) -> None:
    """Serve the model in FOLDER, too.

    The server reads FOLDER on its own machine. Weights of a folder that is served already are shared.
    """
    body = {"model_path": os.path.abspath(folder), "model_id": model_id, "master_status": level}
    client = Client(url, api_key(api_key_file), timeout=MOVE_SECONDS)
    done = order(client, "/fork_master", body)
    click.echo(done.get("message") or moved(done, "taken"))
