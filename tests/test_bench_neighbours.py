"""`xllm bench neighbours`: its arithmetic, and what a SIGTERM leaves behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from checkpoints import tiny_checkpoint
from memory_cgroup import memory_cgroup

from xllm_cli.bench.load import Timing
from xllm_cli.bench.neighbours import ADDED_TOKENS, BLOCK_TOKENS, Outcome, Peak

HIT = ADDED_TOKENS + BLOCK_TOKENS


def test_a_further_turn_adds_to_what_was_said() -> None:
    prompts = Peak(conversations=3, prompt_tokens=100, turns=2, at_once=2).prompts(seed=1)
    assert [len(prompt) for prompt in prompts] == [100 + 2 * ADDED_TOKENS] * 3
    assert prompts == Peak(3, 100, 2, 1).prompts(seed=1) != Peak(3, 100, 2, 1).prompts(seed=2)


def test_an_outcome_counts_turns_that_were_computed_anew() -> None:
    turns = [Timing(first=n / 100, between=0.0, tokens=8, computed=HIT + (n == 7)) for n in range(100)]
    outcome = Outcome(turns, failed=0)
    assert (outcome.misses, outcome.computed) == (1, 100 * HIT + 1)
    assert (outcome.quantile(0.5), outcome.quantile(0.99)) == (0.5, 0.99)


@pytest.mark.server
def test_a_sigterm_stops_the_servers_and_removes_their_group() -> None:
    with memory_cgroup(1 << 40) as probe:
        place = probe.folder.parent
    command = [sys.executable, "-m", "xllm_cli.cli", "bench", "neighbours", "--model", str(tiny_checkpoint("llama"))]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not (inside := _processes(place, process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert inside
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not list(place.glob(f"xllm-{process.pid}-*"))
    assert not any(psutil.pid_exists(pid) for pid in inside)


def _processes(place: Path, pid: int) -> list[int]:
    """Who runs in the group of that benchmark."""
    return [int(line) for group in place.glob(f"xllm-{pid}-*") for line in (group / "cgroup.procs").read_text().split()]
