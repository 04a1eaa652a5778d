"""`xllm models`: what a running server serves, and whether it is awake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from xllm_cli.commands.asking import asks, said, size, table
from xllm_cli.commands.client import Client, api_key

COLUMNS = ("MODEL", "STATE", "WEIGHTS", "PARKED", "KV", "CONTEXT")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object a model, a line each.")
@asks
def command(*, as_json: bool, url: str, api_key_file: Path | None) -> None:
    """The models of a server: their states, and the memory each holds."""
    client = Client(url, api_key(api_key_file))
    cards = said(client, "/v1/models", client.get("/v1/models"))["data"]
    facts = said(client, "/vmm", client.get("/vmm"))["models"]
    if as_json:
        for card in cards:
            click.echo(json.dumps({**card, **facts.get(card["id"], {})}))
        return
    click.echo(table([COLUMNS, *(_cells(card, facts.get(card["id"], {})) for card in cards)]))


def _cells(card: dict[str, Any], facts: dict[str, Any]) -> tuple[str, ...]:
    sizes = (size(int(facts.get(name, 0))) for name in ("weights", "parked", "kv_mapped"))
    state = f"{card['state']}, paused" if card.get("is_paused") else card["state"]
    return (card["id"], state, *sizes, str(card["max_model_len"]))
