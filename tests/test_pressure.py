"""A real second process that takes memory whenever it likes, under one limit of the kernel: a wait, never an exit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from memory_cgroup import memory_cgroup

HERE = Path(__file__).parent
LIMIT = 1200 << 20


def test_a_peer_that_takes_memory_between_check_and_map_makes_requests_wait():
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}", "OMP_NUM_THREADS": "1"}
    with memory_cgroup(LIMIT) as group:
        command = group.command([sys.executable, str(HERE / "pressure.py"), "engine"])
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["wrong"], seen["peer"]) == (0, 0)
    assert seen["map_failures"] > 0, seen
