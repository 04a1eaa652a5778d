"""`xllm bench models`: the same requests to a server whose models sleep for each other and to one that refuses."""

from __future__ import annotations

import pytest
from checkpoints import tiny_checkpoint
from click.testing import CliRunner

from xllm_cli.bench import models
from xllm_cli.bench.models import Seen, _rows
from xllm_cli.bench.serve import group


def test_five_models_are_served_in_memory_for_two_and_three_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "CACHE_BYTES", 300_000)
    flags = ["--phy_page_granularity_size=4096", "--dtype=float32"]
    done = CliRunner().invoke(group, ["models", f"--model={tiny_checkpoint('llama')}", "--requests=20", *flags])
    assert done.exit_code == 0, done.output
    answered = [line.split() for line in done.output.splitlines() if "requests answered" in line]
    assert answered[0][0] == "sleeping" and float(answered[0][3]) == 100
    assert answered[1][0] == "resident" and float(answered[1][3]) < 100
    assert "third, not there" in done.output


def test_what_was_refused_has_no_time() -> None:
    rows = list(_rows("sleeping", ["first"], [Seen("first", 0.2), Seen("second", None)], 0))
    assert [row.value for row in rows if row.name.startswith("first: first token")] == [200.0, 200.0]
    assert not [row for row in rows if row.name.startswith("second: first token")]
    assert [row.value for row in rows if row.name == "requests answered"] == [50.0]
