"""`xllm flags`: the README's tables."""

from __future__ import annotations

import json
from pathlib import Path

import click

from xllm_cli import manual, schema


@click.command()
@click.option("--limits", is_flag=True, help="The rules of what goes together instead.")
@click.option("--json_schema", is_flag=True, help="The JSON schema of --config_json_file instead.")
@click.option(
    "--write", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Refresh a README's tables."
)
def command(limits: bool, json_schema: bool, write: Path | None) -> None:
    """Every flag as a Markdown table."""
    if write is not None:
        write.write_text(manual.refresh(write.read_text(encoding="utf-8")), encoding="utf-8")
    elif json_schema:
        click.echo(json.dumps(schema.json_schema(), indent=2))
    else:
        click.echo(manual.limits_table() if limits else manual.flags_table())
