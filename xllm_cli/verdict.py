"""What the rules say of a configuration, in words: broken rules with their smallest fix, what is not built, warnings.

Flags of one reason share a line. Knows no rule and no flag by name.
"""

from __future__ import annotations

from collections.abc import Iterable

from xllm_cli.declare import Flag
from xllm_cli.flags import FLAGS
from xllm_cli.rules import RULES, Case, Change, Rule


def broken_rules(case: Case) -> list[Rule]:
    """The rules that refuse this configuration."""
    return [rule for rule in RULES if not rule.is_warning and rule.broken(case)]


def smallest_fix(rule: Rule, case: Case) -> Change:
    """The first of the rule's fixes that breaks no rule that held before, else the first that mends this one."""
    before = set(broken_rules(case))
    mending = [fix for fix in rule.fixes(case) if not rule.broken(case.changed(fix))]
    return next((fix for fix in mending if set(broken_rules(case.changed(fix))) <= before), mending[0])


def problems(case: Case) -> list[str]:
    """One line for each broken rule, then one for each group of flags that no version of this server will take."""
    lines = [f"{rule.name}: {_named(rule, case)}: {rule.limit}. {_advice(rule, case)}" for rule in broken_rules(case)]
    return lines + _unsupported(case, never=True)


def unbuilt(case: Case) -> list[str]:
    """One line for each reason why values that break no rule cannot be served yet."""
    return _unsupported(case, never=False)


def _unsupported(case: Case, *, never: bool) -> list[str]:
    """Flags of one reason share a line."""
    reasons: dict[str, list[Flag]] = {}
    for one in _configuration():
        if not one.is_supported(case[one.name]) and one.meta.get("never", False) is never:
            reasons.setdefault(one.meta["why"], []).append(one)
    return [
        f"{_list(flags, case)} {'are' if len(flags) > 1 else 'is'} not supported{'' if never else ' yet'}: {why}. "
        f"Fix: {_instead(flags) or _change({one.name: one.default for one in flags})}"
        for why, flags in reasons.items()
    ]


def _configuration() -> Iterable[Flag]:
    return (one for one in FLAGS.values() if one.section != "launch")


def _list(flags: Iterable[Flag], case: Case) -> str:
    return ", ".join(_told(one.name, case) for one in flags)


def warnings(case: Case) -> list[str]:
    """One line for each rule that only warns, then one for each reason why flags change nothing here."""
    rules = [rule for rule in RULES if rule.is_warning and rule.broken(case)]
    named = {name for rule in rules for name in rule.flags}
    lines = [f"{rule.name}: {_named(rule, case)}: {rule.limit}" for rule in rules]
    idle: dict[str, list[Flag]] = {}
    for one in _configuration():
        if one.name not in named and (why := one.why_idle(case[one.name], case.device)):
            idle.setdefault(why, []).append(one)
    return lines + [
        f"{_list(flags, case)} {'have' if len(flags) > 1 else 'has'} no effect here: {why}"
        for why, flags in idle.items()
    ]


def _told(name: str, case: Case) -> str:
    return f"{FLAGS[name].spell(case[name])} ({case.sources.get(name, 'default')})"


def _named(rule: Rule, case: Case) -> str:
    return ", ".join(_told(name, case) for name in rule.flags)


def _advice(rule: Rule, case: Case) -> str:
    return f"Fix: {_change(smallest_fix(rule, case))}"


def _change(change: Change) -> str:
    """What to type, and what to leave out."""
    given = " ".join(FLAGS[name].spell(value) for name, value in change.items() if value is not None)
    unset = ", ".join(f"--{name}" for name, value in change.items() if value is None)
    return " and ".join(part for part in (given, unset and f"leave out {unset}") if part)


def _instead(flags: Iterable[Flag]) -> str:
    return " ".join(one.meta["instead"] for one in flags if "instead" in one.meta)
