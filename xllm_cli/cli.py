"""The `xllm` command: argv → Config → the part that runs it.

Options are generated from `FLAGS`. Nothing heavy is imported before a command is sure to run: help and every error in
the flags come without torch and without the web framework.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from xllm_cli import __version__, manual
from xllm_cli.argv import canonical
from xllm_cli.config import print_form, report, resolve
from xllm_cli.declare import Flag, closest
from xllm_cli.errors import ConfigError, XllmError
from xllm_cli.flags import FLAGS
from xllm_cli.sources import gather


def _option(flag: Flag) -> click.Option:
    """The option of a flag. Its value stays text: all sources are parsed in one place (sources.py)."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if flag.name in ("model", "draft_model"):
            return [CompletionItem(incomplete, type="dir")]
        values = ("true", "false") if flag.kind == "bool" else flag.choices
        return [CompletionItem(value) for value in values if value.startswith(incomplete)]

    return click.Option([f"--{flag.name}"], type=str, help=flag.help, shell_complete=complete)


class ServeCommand(click.Command):
    """`serve`: reads its arguments through argv.py before click sees them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Canonical spelling first; what is wrong with the spelling is reported all at once."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        spelled = canonical(args)
        if spelled.errors and not any(arg.startswith("--help=") for arg in spelled.argv):
            raise ConfigError(report(spelled.errors))
        for warning in spelled.warnings:
            _warn(warning)
        return super().parse_args(ctx, spelled.argv)


class Group(click.Group):
    """The subcommands, with `serve` for a command line that begins with its flags."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`xllm --model …` is an older spelling of `xllm serve --model …`."""
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h", "--version") and len(args[0]) > 2:
            _warn("no subcommand: running `xllm serve`")
            args = ["serve", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The named command, or the likeliest one in the error."""
        if args and args[0] not in self.commands and not ctx.resilient_parsing:
            close = closest(args[0], self.commands)
            hint = f"did you mean `xllm {close[0]}`?" if close else f"there are: {', '.join(sorted(self.commands))}"
            raise click.UsageError(f"no such command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)


def _warn(message: str) -> None:
    click.echo(f"warning: {message}", err=True)


def versions() -> str:
    """One line: this version, Python's and torch's, read from metadata without importing anything."""
    parts = [f"xllm {__version__}", f"python {platform.python_version()}"]
    for name in ("torch", "torch-npu"):
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            parts.append(f"{name} not installed")
    return ", ".join(parts)


def _print_version(ctx: click.Context, param: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        click.echo(versions())
        ctx.exit()


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Versions.")
def xllm() -> None:
    """LLM inference server whose KV cache and weights live in virtual memory.

    \b
    xllm fetch smollm2-135m-instruct
    xllm serve --model=FOLDER --enable_vmm_kvcache=true --vmm_elastic=true
    """


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


xllm.add_command(
    ServeCommand(
        "serve",
        callback=_serve,
        help=_serve.__doc__,
        add_help_option=False,
        params=[_option(flag) for flag in FLAGS.values()],
    )
)


@xllm.command()
@click.argument("name")
def fetch(name: str) -> None:
    """Download a small model; its folder is the last line printed."""
    from xllm_cli.fetch import fetch as fetch_model

    click.echo(str(fetch_model(name)))


@xllm.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> Any:
    """Measure a running server: xllm bench serve --help."""
    from xllm_cli.bench.serve import main as bench_main

    return bench_main(list(arguments))


@xllm.command()
def version() -> None:
    """Versions of this package, Python and torch."""
    click.echo(versions())


@xllm.command()
@click.option("--limits", is_flag=True, help="The rules of what goes together instead.")
@click.option(
    "--write", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Refresh a README's tables."
)
def flags(limits: bool, write: Path | None) -> None:
    """Every flag as a Markdown table."""
    if write is not None:
        write.write_text(manual.refresh(write.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        click.echo(manual.limits_table() if limits else manual.flags_table())


def main(args: Sequence[str] | None = None) -> NoReturn:
    """The entry point. Every deliberate failure ends as a message on stderr and its exit code, never a traceback."""
    try:
        code = xllm.main(args, prog_name="xllm", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone: nothing to tell anyone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except XllmError as error:
        click.echo(f"xllm: {error}", err=True)
        code = error.exit_code
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
