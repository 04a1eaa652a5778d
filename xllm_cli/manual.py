"""Help pages and the README's tables, generated from the flags and the rules; nothing here is written by hand twice."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator

from xllm_cli.declare import Flag, did_you_mean
from xllm_cli.flags import FLAGS, LaunchConfig, sections
from xllm_cli.rules import RULES

_USAGE = "Usage: xllm serve [MODEL] [--flag=value ...]"
_MORE = "--help=all lists every flag, --help=GROUP or --help=WORD some of them."
_COLUMN = 30
_FIRST = ("service", "security", "model", "vmm")  # the sections that most people look for
_BEHAVIOURS = (
    ("R1", "`enable_manual_loader`", "weights VMM loads as if it were set; KV VMM alone leaves it alone", "implied"),
    ("R4", "`enable_vmm_weights`", "sleep, wake-up and fork need it", "HTTP 400 `vmm_weights_required`"),
)


def help_page(topic: str) -> str:
    """The text of `xllm serve --help[=topic]`: short, all, a section's class name, or a word to search for."""
    if topic in ("", "short"):
        body = _groups(flag for flag in FLAGS.values() if flag.meta.get("common"))
        names = ", ".join(heading.partition(":")[0] for _, heading in _headings())
        groups = textwrap.wrap(f"Groups: {names}.", _width(), subsequent_indent="  ")
        return "\n".join([_USAGE, *body, "", *groups, "", _MORE])
    if topic in ("all", "full"):
        return "\n".join([_USAGE, *_groups(FLAGS.values(), is_full=True)])
    word = topic.lower().lstrip("-").replace("-", "_")
    found = [flag for flag in FLAGS.values() if _is_about(flag, word)]
    if not found:
        return f"no flag is about {topic!r}{did_you_mean(word, FLAGS, '--help=')}"
    return "\n".join([*_groups(found, is_full=True), "", _MORE]).lstrip()


def flags_table() -> str:
    """Every flag of the configuration as a Markdown table, one per section."""
    lines = []
    for section, heading in _headings():
        lines += ["", f"**{heading}**", "", "| flag | default | values | |", "|---|---|---|---|"]
        lines += [_row(flag) for flag in FLAGS.values() if flag.section == section]
    return "\n".join(lines).strip()


def limits_table() -> str:
    """The rules of what goes together as a Markdown table."""
    rows = [
        (
            rule.name,
            " ".join(f"`{name}`" for name in rule.flags),
            rule.limit,
            "warning" if rule.is_warning else "exit 2",
        )
        for rule in RULES
    ]
    rows += _BEHAVIOURS
    rows.sort(key=lambda row: (row[0][0] != "R", int(row[0][1:])))
    lines = ["| rule | flags | limit | answer |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def refresh(readme: str) -> str:
    """The README with both tables brought up to date between their markers, which are added where missing."""
    for name, table in (("flags", flags_table()), ("limits", limits_table())):
        block = f"<!-- {name}:begin -->\n{table}\n<!-- {name}:end -->"
        pattern = re.compile(rf"<!-- {name}:begin -->.*?<!-- {name}:end -->", re.DOTALL)
        before, *after = pattern.split(readme, maxsplit=1)
        readme = f"{before}{block}{after[0]}" if after else f"{readme}\n{block}\n"
    return readme


def _headings() -> Iterator[tuple[str, str]]:
    found = {attribute: f"{section.__name__}: {section.__doc__}" for attribute, section in sections()}
    first = {attribute: found.pop(attribute) for attribute in _FIRST}
    yield from (first | found).items()
    yield "launch", f"LaunchConfig: {LaunchConfig.__doc__}"


def _groups(flags: Iterable[Flag], *, is_full: bool = False) -> Iterator[str]:
    chosen = list(flags)
    for section, heading in _headings():
        members = [flag for flag in chosen if flag.section == section]
        if members:
            yield from ("", heading)
        for flag in members:
            yield from _entry(flag, is_full)


def _entry(flag: Flag, is_full: bool) -> list[str]:
    default = "unset" if flag.default is None else str(flag.default).lower() if flag.kind == "bool" else flag.default
    text = flag.help if is_full else flag.help.partition(";")[0]
    notes = [f"default {default}"] if default != "" else []
    if is_full:
        notes = [*([] if flag.kind in ("bool", "str") else [flag.expects]), *notes, *_remarks(flag)]
    lines = textwrap.wrap(f"{text} [{'; '.join(notes)}]" if notes else text, max(_width() - _COLUMN, 30))
    name = f"  --{flag.name}"
    first = name.ljust(_COLUMN) + lines[0] if len(name) < _COLUMN else name
    rest = lines[1:] if len(name) < _COLUMN else lines
    return [first, *(" " * _COLUMN + line for line in rest)]


def _remarks(flag: Flag) -> Iterator[str]:
    """What else to know about a flag: whether it works here, and the rules that name it."""
    if flag.status == "accepted":
        yield f"no effect here: {flag.meta['why']}"
    elif flag.status == "unsupported":
        yield f"not supported{'' if flag.meta.get('never') else ' yet'}: {flag.meta['why']}"
    elif "supported" in flag.meta:
        yield "supported: " + ", ".join("unset" if one is None else str(one) or '""' for one in flag.meta["supported"])
    if "only_on" in flag.meta:
        yield f"only on {' and '.join(flag.meta['only_on'])}"
    if "also" in flag.meta:
        yield "also " + ", ".join(f"--{name}" for name in flag.meta["also"])
    names = dict.fromkeys(rule.name for rule in RULES if flag.name in rule.flags)
    if names:
        yield ", ".join(names)


def _row(flag: Flag) -> str:
    default = "unset" if flag.default is None else flag.spell(flag.default).partition("=")[2]
    note = "; ".join([flag.help, *_remarks(flag)])
    cells = (f"`--{flag.name}`", f"`{default}`" if default else "", flag.expects, note)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _is_about(flag: Flag, word: str) -> bool:
    names = {attribute: heading.partition(":")[0].lower() for attribute, heading in _headings()}
    return word in (flag.section, names[flag.section]) or word in flag.name or word in flag.help.lower()


def _width() -> int:
    return min(shutil.get_terminal_size((100, 24)).columns, 120)
