"""`xllm env`: what to send with a bug report, and what is missing for what one wants to do."""

from __future__ import annotations

import json

import click

from xllm_cli.flags import FLAGS


@click.command()
@click.option(
    "--device", type=click.Choice(FLAGS["device"].choices[1:]), metavar="DEVICE",
    help="Ask for everything this device needs, and try it: npu, cuda or cpu.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def command(device: str | None, as_json: bool) -> int:
    """Versions, devices, drivers and limits here, what is missing and how to get it."""
    from xllm_cli.commands import inspection

    groups = {
        "software": list(inspection.software()),
        "host": list(inspection.host()),
        "limits": list(inspection.limits()),
        "devices": list(inspection.devices(device or "")),
        "variables": list(inspection.variables()),
    }
    if device:
        groups[f"self-test of {device}"] = list(inspection.self_test(device))
    if as_json:
        click.echo(json.dumps({name: [fact._asdict() for fact in found] for name, found in groups.items()}, indent=2))
    else:
        for name, found in groups.items():
            click.echo(name)
            for fact in found:
                click.echo(f"  {fact.name:<32} {fact.value}")
                if fact.fix:
                    click.echo(f"  {'':<32} MISSING: {fact.fix}")
    return int(bool(device) and any(fact.fix for found in groups.values() for fact in found))
