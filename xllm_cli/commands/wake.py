"""`xllm wake`: have a running server bring its model's weights back."""

from __future__ import annotations

from pathlib import Path

import click

from xllm_cli.commands.asking import asks, order, size
from xllm_cli.commands.client import Client, api_key

TIMEOUT_SECONDS = 660.0  # above what the server itself waits for its engine


@click.command()
@click.argument("model", required=False)
@asks
def command(*, model: str | None, url: str, api_key_file: Path | None) -> None:
    """Wake a server's MODEL."""
    client = Client(url, api_key(api_key_file), timeout=TIMEOUT_SECONDS)
    done = order(client, "/wakeup", {"model_id": model})
    click.echo(
        f"{done['model_id']}: {done['before']} → {done['after']} in {done['milliseconds']:.1f} ms; "
        f"took {size(done['taken'])}, {size(done['physical'])} physical"
    )
