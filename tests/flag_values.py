"""Values that a flag may have, and configurations of them, for randomised tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from xllm_cli.declare import FALSE_WORDS, TRUE_WORDS, Flag
from xllm_cli.flags import FLAGS

FREE = [flag for flag in FLAGS.values() if flag.section != "launch" and not flag.meta.get("never")]


def texts(max_size: int | None = None) -> st.SearchStrategy[str]:
    """What a flag of text may be."""
    return st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=max_size)


def value_of(flag: Flag) -> st.SearchStrategy[Any]:
    """Any value within the flag's range, whether it is built or not."""
    low, high, step = flag.meta.get("low", 0), flag.meta.get("high", 10**9), flag.meta.get("multiple", 1)
    if flag.kind in ("int", "bytes"):
        values: st.SearchStrategy[Any] = st.integers(-(-int(low) // step), int(high) // step).map(lambda n: n * step)
    else:
        values = {
            "bool": st.booleans(),
            "float": st.floats(low, high),
            "str": texts(max_size=8),
            "choice": st.sampled_from(flag.choices or ("",)),
        }[flag.kind]
    return values | st.none() if flag.default is None else values


def some_flags(most: int = 8) -> st.SearchStrategy[dict[str, Any]]:
    """A few flags with values."""
    chosen = st.lists(st.sampled_from(FREE), unique_by=lambda flag: flag.name, max_size=most)
    return chosen.flatmap(lambda flags: st.fixed_dictionaries({flag.name: value_of(flag) for flag in flags}))


def words_of(flag: Flag, value: Any) -> list[str]:
    """Texts that mean a value."""
    if value is None:
        return [str(flag.meta["unset"])] if "unset" in flag.meta else []
    if flag.kind == "bool":
        return [*sorted(TRUE_WORDS if value else FALSE_WORDS), str(value).upper()]
    if flag.kind == "choice":
        return [value, value.upper(), value.lower()]
    if flag.kind in ("int", "bytes"):
        units = [f"{value >> 10}KiB"] if flag.kind == "bytes" and value % 1024 == 0 else []
        return [str(value), f"{value:_}", *units]
    return [repr(value)] if flag.kind == "float" else [value]
