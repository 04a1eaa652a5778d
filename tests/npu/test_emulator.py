"""torch_npu as a witness: it keeps the contract that the emulator enforces, and finds every name it links to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ascendcl import build_emulator, environment

pytestmark = pytest.mark.npu
TESTS = Path(__file__).parent.parent

# What torch_npu does of itself: segments, copies of every kind, streams, events, pinned memory, a graph.
PROGRAM = """
import torch, torch_npu
from ascendcl import Emulator

torch.npu.set_device(0)
data = torch.arange(3 << 20, dtype=torch.int32)
for _ in range(2):
    blocks = [torch.empty(size << 20, dtype=torch.int32, device="npu") for size in (1, 3, 60)]
    blocks[1].copy_(data)
    stream, event = torch.npu.Stream(), torch.npu.Event()
    with torch.npu.stream(stream):
        pinned = data.pin_memory()
        blocks[1].copy_(pinned, non_blocking=True)
        blocks[2][: data.numel()].copy_(blocks[1])
        event.record()
    torch.npu.current_stream().wait_event(event)
    torch.npu.synchronize()
    assert torch.equal(blocks[2][: data.numel()].cpu(), data)
    graph = torch.npu.NPUGraph()
    with torch.npu.stream(stream):
        graph.capture_begin()
        blocks[0][:4].copy_(blocks[1][:4])
        graph.capture_end()
    blocks[1][:4].copy_(torch.tensor([5, 6, 7, 8], dtype=torch.int32))
    graph.replay()
    torch.npu.synchronize()
    assert blocks[0][:4].tolist() == [5, 6, 7, 8]
    graph.reset()
    del blocks, graph, stream
    torch.npu.empty_cache()
report = Emulator().report()
assert report["devices"][0]["used"] == 0, report["live"]
assert report["live"]["pending"] == 0 and report["violations"] == []
print(sorted(report["calls"]))
"""


@pytest.mark.parametrize(("segments", "call"), [(False, "aclrtMallocAlign32"), (True, "aclrtMapMem")])
def test_torch_npu_breaks_no_rule_and_misses_no_name(segments: bool, call: str) -> None:
    home = build_emulator()
    variables = environment(home, mode="strict", streams="lazy") | {
        "PYTORCH_NPU_ALLOC_CONF": f"expandable_segments:{segments}",
        "LD_BIND_NOW": "1",  # a name that nobody has ends the process at the import
        "PYTHONPATH": str(TESTS),
    }
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert f"'{call}'" in done.stdout
    assert "left at exit" not in done.stderr
