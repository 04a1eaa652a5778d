"""`xllm bench sleep`: every level is measured on a real server, and the bytes that must be nothing are nothing."""

from __future__ import annotations

import os

import pytest
from checkpoints import tiny_checkpoint

from xllm_cli.bench.memory_watch import held_bytes, memfd_bytes
from xllm_cli.bench.serve import main
from xllm_cli.bench.sleep import copy_milliseconds

FLAGS = ("--dtype=float32", "--max_cache_size=16777216", "--block_size=16")


def test_every_level_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sleep", "--model", str(tiny_checkpoint("llama")), "--cycles=2", *FLAGS]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.startswith("case") and {line.split()[0] for line in lines} == {"light", "parked", "deep", "all"}
    resident = {line.split()[0]: float(line.split()[7]) for line in lines if "resident while asleep" in line}
    assert resident["light"] == resident["deep"] == 0 < resident["parked"]
    assert all("memcpy" in line for line in lines if "wake-up" in line and " ms " in line)


def test_memory_is_seen_from_outside() -> None:
    before = memfd_bytes(os.getpid())
    fd = os.memfd_create("pages")
    try:
        os.pwrite(fd, bytes(1 << 20), 0)
        assert memfd_bytes(os.getpid()) - before >= 1 << 20
        assert held_bytes(os.getpid()) > memfd_bytes(os.getpid())
    finally:
        os.close(fd)


def test_the_floor_is_a_copy() -> None:
    assert 0 < copy_milliseconds(1 << 20) < 1000
