"""`xllm wake`: have a running server bring a model's weights back."""

from __future__ import annotations

from pathlib import Path

import click

from xllm_cli.commands.asking import MOVE_SECONDS, asks, moved, names_model, order
from xllm_cli.commands.client import Client, api_key


@click.command()
@names_model
@asks
def command(*, model_id: str | None, url: str, api_key_file: Path | None) -> None:
    """Wake a server's MODEL."""
    client = Client(url, api_key(api_key_file), timeout=MOVE_SECONDS)
    click.echo(moved(order(client, "/wakeup", {"model_id": model_id}), "taken"))
