"""`xllm completion SHELL`: a script that lets a shell ask, at every TAB, what may come next.

The script sends the line up to the cursor in _XLLM_LINE and gets one candidate a line, as a whole word, with its help
behind a tab. What may follow is click's to find (`shell_complete` of commands and options); that values are given as
`--flag=value`, and that paths are listed here and not by the shell, is the same for the three shells this way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import click
from click.shell_completion import CompletionItem, ShellComplete, add_completion_class, split_arg_string

VARIABLE = "_XLLM_COMPLETE"  # what click looks at
_LINE = "_XLLM_LINE"

_BASH = """\
# eval "$(xllm completion bash)"
_xllm_completion() {
    local line=${COMP_LINE:0:COMP_POINT} word candidate
    word=${line##*[[:space:]]}
    COMPREPLY=()
    while IFS=$'\\t' read -r candidate _; do
        [[ $candidate ]] || continue
        # bash counts what follows a = as a word of its own
        [[ $COMP_WORDBREAKS == *=* && $word == *=* ]] && candidate=${candidate#"${word%%=*}="}
        [[ $candidate == *[=/] ]] && compopt -o nospace
        printf -v candidate '%q' "$candidate"
        COMPREPLY+=("${candidate/#\\\\~/"~"}")
    done < <(_XLLM_LINE=$line _XLLM_COMPLETE=bash_complete "$1" 2>/dev/null)
}
complete -o nosort -F _xllm_completion xllm
"""

_ZSH = """\
#compdef xllm
# eval "$(xllm completion zsh)", after compinit
_xllm_completion() {
    local line="${(j: :)words[1,CURRENT-1]} $PREFIX" candidate text
    local -a open closed
    while IFS=$'\\t' read -r candidate text; do
        [[ -n $candidate ]] || continue
        text="${candidate//:/\\\\:}${text:+:$text}"
        [[ $candidate == *[=/] ]] && open+=("$text") || closed+=("$text")
    done < <(_XLLM_LINE=$line _XLLM_COMPLETE=zsh_complete "${words[1]}" 2>/dev/null)
    (( $#open )) && _describe -V xllm open -S ''
    (( $#closed )) && _describe -V xllm closed
    (( $#open + $#closed ))
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _xllm_completion "$@"
else
    compdef _xllm_completion xllm
fi
"""

_FISH = """\
# xllm completion fish | source
function _xllm_completion
    set -l program (commandline -opc)[1]
    env _XLLM_LINE=(commandline -cp | string join ' ') _XLLM_COMPLETE=fish_complete $program 2>/dev/null \\
        | string match --regex '.+'
end
complete --no-files --command xllm --arguments '(_xllm_completion)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


class WholeWords(ShellComplete):
    """Completes the last word of the line in the environment."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words after the program's name, and the one that is begun."""
        line = os.environ.get(_LINE, "")
        words = split_arg_string(line)
        incomplete = "" if not words or line[-1:].isspace() else words.pop()
        return words[_program(words) + 1 :], incomplete

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """The candidates for the whole word, spelled as it was begun: hyphens, a flag in front of a value."""
        typed, equals, _ = incomplete.partition("=")
        is_flag = incomplete.startswith("-")
        words, last = [_spelled(word) for word in args], _spelled(incomplete)
        found = super().get_completions(words, last)
        if not found and [*words, last][0].startswith("--"):  # `serve` may be left out
            found = super().get_completions(["serve", *words], last)
        items = [item for one in found for item in _paths(one)]
        if is_flag and equals:
            return [CompletionItem(f"{typed}={item.value}", help=item.help) for item in items]
        if is_flag and "-" in typed[2:]:
            return [CompletionItem("--" + item.value[2:].replace("_", "-"), help=item.help) for item in items]
        return items

    def format_completion(self, item: CompletionItem) -> str:
        """The line of a candidate."""
        return f"{item.value}\t{item.help or ''}"


class _Bash(WholeWords):
    name, source_template = "bash", _BASH


class _Zsh(WholeWords):
    name, source_template = "zsh", _ZSH


class _Fish(WholeWords):
    name, source_template = "fish", _FISH


def register() -> None:
    """Have click answer the shells in this way."""
    for answer in (_Bash, _Zsh, _Fish):
        add_completion_class(answer)


def _program(words: list[str]) -> int:
    """Where the program stands: variables may be set in front of it."""
    return next((at for at, word in enumerate(words) if os.path.basename(word).startswith("xllm")), 0)


def _spelled(word: str) -> str:
    """A flag with underscores in its name, other words as they are."""
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") and len(name) > 2 else word


def _paths(item: CompletionItem) -> Iterator[CompletionItem]:
    """The folders (and files, unless only folders are wanted) that begin like the item, if it asks for a path."""
    if item.type not in ("dir", "file"):
        yield item
        return
    head, tail = os.path.split(item.value)
    try:
        entries = sorted(os.scandir(os.path.expanduser(head) or "."), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(tail) and (tail or not entry.name.startswith(".")):
            if entry.is_dir():
                yield CompletionItem(os.path.join(head, entry.name) + "/")
            elif item.type == "file":
                yield CompletionItem(os.path.join(head, entry.name))


@click.command()
@click.argument("shell", type=click.Choice(list(SCRIPTS)))
def command(shell: str) -> None:
    """A script for bash, zsh or fish that completes commands, flags, values and folders."""
    click.echo(SCRIPTS[shell], nl=False)
