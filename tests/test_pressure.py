"""A real second process that takes memory whenever it likes, under one limit of the kernel: a wait, never an exit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from memory_cgroup import memory_cgroup

HERE = Path(__file__).parent
LIMIT = 1200 << 20
RACE_LIMIT = 400 << 20


ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}", "OMP_NUM_THREADS": "1"}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=110, check=False)


def test_a_peer_that_takes_memory_between_check_and_map_makes_requests_wait():
    with memory_cgroup(LIMIT) as group:
        done = run(group.command([sys.executable, str(HERE / "pressure.py"), "engine"]))
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["wrong"], seen["peer"]) == (0, 0)
    assert seen["map_failures"] > 0, seen


def test_processes_that_race_for_pages_of_one_budget_only_ever_miss(tmp_path: Path):
    with memory_cgroup(RACE_LIMIT) as group, ThreadPoolExecutor(2) as threads:
        command = group.command([sys.executable, str(HERE / "pressure.py"), "racer", str(tmp_path / "lock")])
        done = list(threads.map(run, [command] * 2))
    assert [one.returncode for one in done] == [0, 0], done[0].stderr[-900:] + done[1].stderr[-900:]
    seen = [json.loads(one.stdout) for one in done]
    assert min(one["takes"] for one in seen) > 20, seen
    assert min(one["misses"] for one in seen) > 0, seen
    assert sum(one["most"] for one in seen) > RACE_LIMIT // 4 and not any(one["left"] for one in seen), seen
