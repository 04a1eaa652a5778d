"""Captured steps under the whole engine on an emulated device, while pages come and go and requests are preempted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from ascendcl import Emulator

from npu.dispatch import ComputeOnHost, install
from npu.graphs import EmulatedGraph
from npu.parity import GREEDY, assert_alike, prompts_of
from npu.small_model import NUM_TENSORS
from xllm_cli import LLM
from xllm_cli.flags import Config
from xllm_cli.llm import Completion
from xllm_cli.worker.npu_device import NpuDevice, open_npu

pytestmark = pytest.mark.npu
MIB = 1 << 20
ELASTIC = {"enable_vmm_kvcache": True, "vmm_elastic": True, "dtype": "float32", "random_seed": 1}
PRESSED = {**ELASTIC, "max_cache_size": 3 * NUM_TENSORS * 2 * MIB}  # 12 blocks, one of them for padding
GRAPHS = {"enable_graph": True, "acl_graph_decode_batch_size_limit": 8}
PROMPTS = prompts_of(6)


@pytest.fixture(scope="module", autouse=True)
def mode() -> Iterator[ComputeOnHost]:
    """References in place of what CANN would compute, emulated graphs in place of torch.npu's."""
    NpuDevice(Config()).open_driver().close()
    open_npu(0)
    entered = install()
    yield entered
    entered.__exit__(None, None, None)


@pytest.fixture(scope="module")
def on_cpu(model: Path) -> list[Completion]:
    """What the cpu answers, never short of anything."""
    with LLM(model, device="cpu", **ELASTIC, max_cache_size=256 * MIB) as llm:
        return llm.generate(PROMPTS, GREEDY)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Replays of each captured graph."""
    seen: Counter[int] = Counter()
    replay = EmulatedGraph.replay

    def counted(graph: EmulatedGraph) -> None:
        seen[id(graph)] += 1
        replay(graph)

    monkeypatch.setattr(EmulatedGraph, "replay", counted)
    return seen


def test_under_pressure_captured_steps_answer_as_the_cpu(
    model: Path, on_cpu: list[Completion], replays: Counter[int]
) -> None:
    emulator = Emulator()
    with LLM(model, device="npu", **PRESSED, **GRAPHS) as llm:
        assert_alike(llm.generate(PROMPTS, GREEDY), on_cpu)
        counters = llm.snapshot.counters
        assert counters.preemptions > 0 and counters.pages_mapped >= 2 * NUM_TENSORS
        assert len(replays) >= 2 and replays.total() >= GREEDY.max_tokens - 1
        llm.engine.check()
    assert not emulator.leaks().get("mappings") and not emulator.violations()


def test_pages_leave_and_return_under_a_graph(model: Path, on_cpu: list[Completion], replays: Counter[int]) -> None:
    """Between two requests only the padding block's pages stay mapped."""
    with LLM(model, device="npu", **PRESSED, **GRAPHS, enable_prefix_cache=False) as llm:
        for _ in range(2):
            assert_alike(llm.generate(PROMPTS[3:5], GREEDY), on_cpu[3:5])
            deadline = time.monotonic() + 20
            while llm.memory()["mapped"] > NUM_TENSORS * 2 * MIB and time.monotonic() < deadline:
                llm.idle()
            assert llm.memory()["mapped"] == NUM_TENSORS * 2 * MIB
        assert llm.snapshot.counters.pages_unmapped >= NUM_TENSORS
    assert replays.total() >= 2 * (GREEDY.max_tokens - 1)
