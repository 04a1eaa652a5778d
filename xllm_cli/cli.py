"""The `xllm` command: finds the subcommand, and turns every deliberate failure into a message and an exit code.

Each subcommand is one file in commands/. Nothing heavy is imported before one is sure to run: help and every error in
the flags come without torch and without the web framework.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from types import MappingProxyType
from typing import NoReturn, cast

import click

from xllm_cli.commands.completion import VARIABLE as COMPLETE_VARIABLE
from xllm_cli.commands.completion import register as register_completion
from xllm_cli.commands.version import line as version_line
from xllm_cli.declare import closest
from xllm_cli.errors import XllmError

# Each is a file in commands/; its line is here so that the list of them needs none of the files.
COMMANDS = MappingProxyType(
    {
        "bench": "Measure servers, their pages, and neighbours on one device.",
        "check": "Ask a running server everything once.",
        "completion": "A script that completes commands and flags in bash, zsh or fish.",
        "env": "Versions, devices and limits here, and what is missing.",
        "fetch": "Download a small model.",
        "flags": "Every flag as a Markdown table.",
        "fork": "Have a running server serve one more model.",
        "models": "What a running server serves, and whether it is awake.",
        "pause": "Hold the requests of a running server's models back.",
        "remove": "Take a model out of a running server.",
        "resume": "Let the requests of a running server's models run again.",
        "serve": "Serve a model over HTTP with OpenAI's API.",
        "sleep": "Put a running server's model to sleep: its memory goes to others.",
        "update": "Exchange the weights of a running server's model.",
        "version": "Versions of this package and of what it runs on.",
        "vmm": "Engines that share a device: show, limit and trim their memory.",
        "wake": "Wake a running server's model.",
    }
)


class Group(click.Group):
    """The subcommands, with `serve` for a command line that begins with its flags."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, from its own file."""
        if cmd_name not in COMMANDS:
            return None
        found = cast(click.Command, importlib.import_module(f"xllm_cli.commands.{cmd_name}").command)
        found.name = cmd_name
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in the help."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`xllm --model …` is an older spelling of `xllm serve --model …`."""
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h", "--version") and len(args[0]) > 2:
            if not ctx.resilient_parsing:
                click.echo("warning: no subcommand: running `xllm serve`", err=True)
            args = ["serve", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The named command, or the likeliest one in the error."""
        if args and args[0] not in COMMANDS and not ctx.resilient_parsing:
            close = closest(args[0], COMMANDS)
            hint = f"did you mean `xllm {close[0]}`?" if close else f"there are: {', '.join(COMMANDS)}"
            raise click.UsageError(f"no such command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)


def _print_version(ctx: click.Context, param: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        click.echo(version_line())
        ctx.exit()


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Versions.")
def xllm() -> None:
    """LLM inference server whose KV cache and weights live in virtual memory.

    \b
    xllm fetch smollm2-135m-instruct
    xllm serve --model=FOLDER --enable_vmm_kvcache=true --vmm_elastic=true
    """


def _open_standard_descriptors() -> None:
    """Give a closed stdin, stdout or stderr to nothing, lest the next file opened takes its number and our output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """The entry point. Every deliberate failure ends as a message on stderr and its exit code, never a traceback."""
    _open_standard_descriptors()
    if COMPLETE_VARIABLE in os.environ:
        register_completion()
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
