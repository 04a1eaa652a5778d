"""Measured numbers beside their floors and bars, and the table of them. Knows not what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple


class Row(NamedTuple):
    """One number. `floor` is what the same work costs without us, in the same unit; None where there is none.

    `bar` is the most it should be (project's goals), None without one.
    """

    case: str
    name: str
    value: float
    unit: str
    floor: float | None = None
    floor_is: str = ""
    bar: float | None = None


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
