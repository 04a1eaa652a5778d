"""`xllm fetch`: a small model's folder."""

from __future__ import annotations

import click


@click.command()
@click.argument("name")
def command(name: str) -> None:
    """Download a small model; its folder is the last line printed."""
    from xllm_cli.fetch import fetch

    click.echo(str(fetch(name)))
