"""`xllm bench`: measurements, in xllm_cli/bench/."""

from __future__ import annotations

from typing import Any

import click


@click.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> Any:
    """Measure a running server: xllm bench serve --help."""
    from xllm_cli.bench.serve import main

    return main(list(arguments))
