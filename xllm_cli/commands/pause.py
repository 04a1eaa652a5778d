"""`xllm pause`: have a running server hold a model's requests back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from xllm_cli.commands.asking import WAIT_SECONDS, asks, names_model, order
from xllm_cli.commands.client import Client, api_key

MODES = click.Choice(["keep", "abort", "wait"])
MODE = "What becomes of running requests; those that are kept go on after `xllm resume`."


@click.command()
@names_model
@click.option("--mode", type=MODES, default="keep", show_default=True, help=MODE)
@asks
def command(*, model_id: str | None, mode: str, url: str, api_key_file: Path | None) -> None:
    """Run nothing of a server's MODEL until `xllm resume`, of all its models if none is named; new requests wait."""
    client = Client(url, api_key(api_key_file), timeout=WAIT_SECONDS)
    tell(order(client, "/pause", {"model_id": model_id, "mode": mode}))


def tell(done: dict[str, Any]) -> None:
    """A line for each model."""
    for name, change in done["models"].items():
        click.echo(f"{name}: {change['before']} → {change['after']} in {done['milliseconds']:.1f} ms")
