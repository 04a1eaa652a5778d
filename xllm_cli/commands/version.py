"""`xllm version`: one line."""

from __future__ import annotations

import click

from xllm_cli.versions import versions


def line() -> str:
    """All versions in one line."""
    return ", ".join(f"{name} {version}" for name, version in versions().items())


@click.command()
def command() -> None:
    """Versions of this package and of what it runs on."""
    click.echo(line())
