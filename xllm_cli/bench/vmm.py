"""`xllm bench vmm`: what pages, blocks and limits cost here, each beside the floor measured in the same run.

The cases are in vmm_cases.py; this is their table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from xllm_cli.bench.rows import Row
from xllm_cli.bench.vmm_cases import CASES
from xllm_cli.errors import ConfigError


def measure(names: Iterable[str], *, quick: bool) -> Iterator[Row]:
    """Run these cases (none: all), in the table's order. Raises ConfigError for a name that is none."""
    wanted = list(names) or list(CASES)
    if unknown := sorted(set(wanted) - CASES.keys()):
        raise ConfigError(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    for name, case in CASES.items():
        if name in wanted:
            yield from case(quick)
