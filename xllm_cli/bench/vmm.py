"""`xllm bench vmm`: what pages, blocks and limits cost here, each beside the floor measured in the same run.

The cases are in vmm_cases.py; this is their table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from xllm_cli.bench.vmm_cases import CASES, Row
from xllm_cli.errors import ConfigError


def measure(names: Iterable[str], *, quick: bool) -> Iterator[Row]:
    """Run these cases (none: all), in the table's order. Raises ConfigError for a name that is none."""
    wanted = list(names) or list(CASES)
    if unknown := sorted(set(wanted) - CASES.keys()):
        raise ConfigError(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    for name, case in CASES.items():
        if name in wanted:
            yield from case(quick)


def line(row: Row) -> str:
    """One row of the table: value, floor, their ratio, and whether the bar is met."""
    floor = f"{row.floor:10.3f} {row.floor_is}" if row.floor is not None else ""
    ratio = f"{row.value / row.floor:7.2f}x" if row.floor else ""
    bar = f"{row.bar:g} {'met' if row.value <= row.bar else 'missed'}" if row.bar is not None else ""
    return f"{row.case:<11}{row.name:<62}{row.value:12.3f} {row.unit:<6}{ratio:>9}  {floor:<34}{bar}".rstrip()


HEADING = f"{'case':<11}{'what':<62}{'value':>12} {'unit':<6}{'ratio':>9}  {'floor':<34}bar"


def as_json(rows: Iterable[Row]) -> str:
    """The rows as a JSON list of objects."""
    return json.dumps(
        [{**row._asdict(), "ratio": row.value / row.floor if row.floor else None} for row in rows], indent=1
    )
