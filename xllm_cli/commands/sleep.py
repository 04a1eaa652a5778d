"""`xllm sleep`: have a running server give a model's memory to others."""

from __future__ import annotations

from pathlib import Path

import click

from xllm_cli.commands.asking import WAIT_SECONDS, asks, moved, names_model, order
from xllm_cli.commands.client import Client, api_key

LEVEL = "1 keeps a copy of the weights on the host, 2 reads the checkpoint again to wake."
PARK = "Only set the pages aside, until somebody needs them: awake again at once."
MODES = click.Choice(["refuse", "wait", "abort"])


@click.command()
@names_model
@click.option("--level", type=click.IntRange(1, 2), default=1, show_default=True, help=LEVEL)
@click.option("--park", is_flag=True, help=PARK)
@click.option("--mode", type=MODES, default="refuse", show_default=True, help="What becomes of open requests.")
@asks
def command(*, model_id: str | None, level: int, park: bool, mode: str, url: str, api_key_file: Path | None) -> None:
    """Put a server's MODEL to sleep: its weights and KV leave the device, its address goes on answering."""
    client = Client(url, api_key(api_key_file), timeout=WAIT_SECONDS)
    done = order(client, "/sleep", {"model_id": model_id, "master_status": level, "park": park, "mode": mode})
    click.echo(moved(done, "freed"))
