"""`xllm resume`: end what `xllm pause` began."""

from __future__ import annotations

from pathlib import Path

import click

from xllm_cli.commands.asking import STEP_SECONDS, asks, names_model, order
from xllm_cli.commands.client import Client, api_key
from xllm_cli.commands.pause import tell


@click.command()
@names_model
@asks
def command(*, model_id: str | None, url: str, api_key_file: Path | None) -> None:
    """Let the requests of a server's MODEL run again, of all its models if none is named."""
    client = Client(url, api_key(api_key_file), timeout=STEP_SECONDS)
    tell(order(client, "/resume", {"model_id": model_id}))
