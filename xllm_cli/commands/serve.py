"""`xllm serve`: argv → Config → the server. Its options are generated from `FLAGS`."""

from __future__ import annotations

import os

import click

from xllm_cli import manual
from xllm_cli.argv import canonical
from xllm_cli.config import print_form, report, resolve
from xllm_cli.declare import Flag
from xllm_cli.errors import ConfigError
from xllm_cli.flags import FLAGS
from xllm_cli.sources import gather


def _option(flag: Flag) -> click.Option:
    """The option of a flag. Its value stays text: all sources are parsed in one place (sources.py)."""
    return click.Option([f"--{flag.name}"], type=str, help=flag.help)


class ServeCommand(click.Command):
    """`serve`: reads its arguments through argv.py before click sees them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Canonical spelling first; what is wrong with the spelling is reported all at once."""
        spelled = canonical(args)
        if ctx.resilient_parsing:  # a shell asks for completions
            return super().parse_args(ctx, spelled.argv)
        if spelled.errors and not any(arg.startswith("--help=") for arg in spelled.argv):
            raise ConfigError(report(spelled.errors))
        for warning in spelled.warnings:
            _warn(warning)
        return super().parse_args(ctx, spelled.argv)


def _warn(message: str) -> None:
    click.echo(f"warning: {message}", err=True)


def _serve(**texts: str | None) -> int:
    """Serve a model over HTTP with OpenAI's API."""
    given = {name: text for name, text in texts.items() if text is not None}
    if "help" in given:
        click.echo(manual.help_page(given["help"]))
        return 0
    settings = gather(given, os.environ)
    for warning in settings.warnings:
        _warn(warning)
    prints = settings.given.get("print_config")
    resolved = resolve(settings, needs_model=prints is None or prints.value == "false")
    for warning in resolved.warnings:
        _warn(warning)
    if resolved.launch.print_config != "false":
        click.echo(print_form(resolved))
        return 0
    from xllm_cli.server.run import run

    return run(resolved.config)


command = ServeCommand(
    "serve",
    callback=_serve,
    help=_serve.__doc__,
    add_help_option=False,
    params=[_option(flag) for flag in FLAGS.values()],
)
