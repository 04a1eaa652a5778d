"""`xllm serve`: argv → Config → the server. Its options are generated from `FLAGS`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence

import click
from click.shell_completion import CompletionItem

from xllm_cli import logs, manual
from xllm_cli.argv import canonical
from xllm_cli.config import dump, print_form, rank_commands, report, resolve
from xllm_cli.declare import Flag
from xllm_cli.errors import ConfigError
from xllm_cli.flagfile import Token, expand
from xllm_cli.flags import FLAGS, ServiceConfig
from xllm_cli.sources import gather

logger = logging.getLogger(__name__)
_WARNINGS = "xllm.warnings"  # where click's context keeps those about the spelling
_FILES = "xllm.flagfiles"  # and the flagfile that gave a flag its value


def _option(flag: Flag) -> click.Option:
    """The option of a flag. Its value stays text: all sources are parsed in one place (sources.py)."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if flag.name.endswith("file"):
            return [CompletionItem(incomplete, type="file")]
        if flag.name.endswith(("model", "_dir")):
            return [CompletionItem(incomplete, type="dir")]
        values = ("true", "false") if flag.kind == "bool" else flag.choices
        return [CompletionItem(value) for value in values if value and value.startswith(incomplete)]

    return click.Option([f"--{flag.name}"], type=str, help=flag.help, shell_complete=complete)


class ServeCommand(click.Command):
    """`serve`: reads its arguments through argv.py before click sees them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Canonical spelling first; what is wrong with the spelling is reported all at once."""
        if ctx.resilient_parsing:  # a shell asks for completions
            return super().parse_args(ctx, canonical(args).argv)
        tokens = expand(args)
        spelled = canonical([token.text for token in tokens])
        files = _files(tokens)
        if spelled.errors and not any(arg.startswith("--help=") for arg in spelled.argv):
            raise ConfigError(report([f"{files[each]}: {each}" if each in files else each for each in spelled.errors]))
        ctx.meta[_WARNINGS] = spelled.warnings
        ctx.meta[_FILES] = {arg[2:].partition("=")[0]: files[arg] for arg in spelled.argv if arg in files}
        return super().parse_args(ctx, spelled.argv)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The flags that begin so, ready for their values, or the folders of a model given without its flag."""
        if not incomplete.startswith("-"):
            return [CompletionItem(incomplete, type="dir")]
        names = {f"--{name}=": flag for name, flag in FLAGS.items()}
        if incomplete.startswith("--no"):
            names |= {f"--no{name}": flag for name, flag in FLAGS.items() if flag.kind == "bool"}
        return [CompletionItem(name, help=flag.help) for name, flag in names.items() if name.startswith(incomplete)]


def _files(tokens: Sequence[Token]) -> dict[str, str]:
    """By what a line of a flagfile says in canonical spelling, or what is wrong with it: "flagfile" and the file's
    name. A line is a whole flag, so it can be read without the others."""
    named: dict[str, str] = {}
    for token in tokens:
        spelled = canonical([token.text])
        for said in (*spelled.argv, *spelled.errors):
            if token.file:
                named[said] = f"flagfile {token.file}"
            else:
                named.pop(said, None)
    return named


def _serve(**texts: str | None) -> int:
    """Serve a model over HTTP with OpenAI's API."""
    given = {name: text for name, text in texts.items() if text is not None}
    if "help" in given:
        click.echo(manual.help_page(given["help"]))
        return 0
    meta = click.get_current_context().meta
    settings = gather(given, os.environ, meta.get(_FILES, {}))
    warnings = [*meta.get(_WARNINGS, ()), *settings.warnings]
    try:
        resolved = resolve(settings, needs_model=True)
    except ConfigError:
        _warn(warnings)
        raise
    warnings += resolved.warnings
    if resolved.launch.only_prints:
        _warn(warnings)
        click.echo(print_form(resolved))
        for line in rank_commands(resolved) if resolved.launch.dry_run else ():
            click.echo(line, err=True)
        return 0
    service = resolved.config.service
    _warn(warnings, service if service.log_format == "json" else None)
    if resolved.launch.enable_dump_config_json:
        dump(resolved)
    from xllm_cli.server.run import run

    return run(resolved.config)


def _warn(warnings: Iterable[str], service: ServiceConfig | None = None) -> None:
    """Lines on stderr, or records in the log of `service`, where every line is to be an object."""
    if service is not None:
        logs.set_up(service)
    for warning in warnings:
        if service is not None:
            logger.warning("%s", warning)
        else:
            click.echo(f"warning: {warning}", err=True)


command = ServeCommand(
    "serve",
    callback=_serve,
    help=_serve.__doc__,
    add_help_option=False,
    params=[_option(flag) for flag in FLAGS.values()],
)
