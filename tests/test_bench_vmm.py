"""`xllm bench vmm`: every case yields rows, the table says what is met, and the counts that must be zero are."""

from __future__ import annotations

import json

import pytest

from xllm_cli.bench.rows import Row, as_json, line
from xllm_cli.bench.serve import main
from xllm_cli.bench.vmm import measure
from xllm_cli.bench.vmm_cases import CASES
from xllm_cli.errors import ConfigError


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_case_measures_something_and_a_floor_is_positive(case: str) -> None:
    rows = list(measure([case], quick=True))
    assert rows and {row.case for row in rows} == {case}
    assert all(row.floor is None or row.floor > 0 for row in rows)
    counts = [row for row in rows if row.bar is not None and row.unit in ("", "B", "pp") and row.case != "churn"]
    assert [row for row in counts if row.value > row.bar] == []


def test_idle_bytes_are_packed_after_a_churn() -> None:
    ratios = {row.name: row.value for row in measure(["churn"], quick=True) if row.name.startswith("idle bytes")}
    assert len(ratios) == 3 and all(ratio <= 1.10 for ratio in ratios.values()), ratios


def test_a_line_shows_the_ratio_to_the_floor_and_the_bar() -> None:
    met = line(Row("blocks", "alloc(1)", 3.0, "us", 1.5, "Python list", 20.0))
    assert "2.00x" in met and "1.500 Python list" in met and met.endswith("20 met")
    assert line(Row("cold", "free(1)", 6.0, "us", bar=5.0)).endswith("5 missed")
    (entry,) = json.loads(as_json([Row("swing", "calls", 0.0, "")]))
    assert entry["ratio"] is None and entry["value"] == 0


def test_an_unknown_case_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no such case: swings; there are blocks, cold"):
        list(measure(["swings"], quick=True))


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vmm", "--quick", "swing"]) == 0
    heading, first, *_ = capsys.readouterr().out.splitlines()
    assert heading.startswith("case") and first.startswith("swing")
    assert main(["vmm", "--quick", "--json", "reserve"]) == 0
    assert [row["case"] for row in json.loads(capsys.readouterr().out)] == ["reserve", "reserve"]
