"""The whole engine on an emulated device: real torch_npu, the real driver, references in place of npu_* operators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ascendcl import Emulator
from checkpoints import tiny_checkpoint

from npu import dropped_maps
from npu.parity import GREEDY, assert_alike, prompts_of
from npu.small_model import BLOCKS_PER_PAGE, NUM_TENSORS
from xllm_cli import LLM
from xllm_cli.core import SamplingParams
from xllm_cli.errors import ModelError
from xllm_cli.llm import Completion

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("computing")]
MIB = 1 << 20
ELASTIC = {"enable_vmm_kvcache": True, "vmm_elastic": True, "dtype": "float32", "random_seed": 1}
PRESSED = {**ELASTIC, "max_cache_size": 3 * NUM_TENSORS * 2 * MIB}  # 12 blocks, one of them for padding
OUT_OF_MEMORY = 207001
PROMPTS = prompts_of(6)


@pytest.fixture(scope="module")
def on_cpu(model: Path) -> list[Completion]:
    """What the cpu answers, never short of anything."""
    with LLM(model, device="cpu", **ELASTIC, max_cache_size=256 * MIB) as llm:
        return llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("flags", [{}, {"enable_vmm_kvcache": True, "vmm_elastic": True}], ids=["physical", "elastic"])
def test_tokens_are_those_of_transformers(flags: dict[str, object], emulator: Emulator) -> None:
    answers = json.loads((tiny_checkpoint("llama") / "oracle.json").read_text())["answers"]
    greedy = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    with LLM(tiny_checkpoint("llama"), device="npu", dtype="float32", max_cache_size=64 * MIB, **flags) as llm:
        found = llm.generate([answer["prompt"] for answer in answers], greedy)
        assert llm.memory()["device"] == "npu" and llm.memory()["driver"] == ("acl" if flags else "none")
    assert [answer.token_ids for answer in found] == [answer["tokens"] for answer in answers]


def test_under_pressure_and_with_hits_every_answer_is_the_cpus(
    model: Path, on_cpu: list[Completion], emulator: Emulator
) -> None:
    with LLM(model, device="npu", **PRESSED) as llm:
        assert_alike(llm.generate(PROMPTS, GREEDY), on_cpu)
        counters = llm.snapshot.counters
        assert counters.preemptions > 0 and counters.pages_mapped >= 2 * NUM_TENSORS
        again = llm.generate(PROMPTS[2:4], GREEDY)
        assert_alike(again, on_cpu[2:4])
        assert llm.snapshot.counters.prefix_cache_hits > counters.prefix_cache_hits
        assert [answer.cached_tokens for answer in again] == [128, 128]
        llm.engine.check()
    assert emulator.calls("aclrtMapMem") >= counters.pages_mapped


def test_memory_returns_to_the_device_and_the_padding_block_stays(model: Path, emulator: Emulator) -> None:
    flags = {**PRESSED, "enable_prefix_cache": False}
    with LLM(model, device="npu", **flags) as llm:
        empty = emulator.device()["used"]
        llm.generate(prompts_of(5, 200), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        assert llm.memory()["mapped"] > NUM_TENSORS * 2 * MIB
        deadline = time.monotonic() + 20
        while (memory := llm.memory())["mapped"] > NUM_TENSORS * 2 * MIB and time.monotonic() < deadline:
            llm.idle()
        assert memory["mapped"] == memory["physical"] == NUM_TENSORS * 2 * MIB
        assert memory["kv_live"] == memory["mapped"] // BLOCKS_PER_PAGE
        assert emulator.device()["used"] <= empty


@pytest.mark.parametrize("function", ["aclrtMallocPhysical", "aclrtMapMem"])
def test_a_device_without_memory_is_a_wait_and_no_end(
    model: Path, on_cpu: list[Completion], emulator: Emulator, function: str
) -> None:
    with LLM(model, device="npu", **ELASTIC, max_cache_size=64 * MIB) as llm:
        emulator.inject(function, OUT_OF_MEMORY, nth=2, count=3)
        assert_alike(llm.generate(PROMPTS[:3], GREEDY), on_cpu[:3])
        assert llm.snapshot.counters.map_failures > 0 and llm.snapshot.healthy
        llm.engine.check()
    assert emulator.counters()[function].injected == 3


def test_a_neighbour_that_takes_the_device_is_waited_for(
    model: Path, on_cpu: list[Completion], emulator: Emulator
) -> None:
    with LLM(model, device="npu", **ELASTIC, memory_wait_seconds=1) as llm:
        taken = emulator.device()["free"] - 4 * MIB
        emulator.neighbour(taken)
        short = llm.generate(prompts_of(1, 4000), GREEDY)[0]  # more than torch_npu's allocator can give back
        assert short.error is not None and short.error.status == 503
        assert short.error.code in ("kv_memory_unavailable", "execution_memory_unavailable"), short.error
        emulator.neighbour(-taken)
        assert_alike(llm.generate(PROMPTS[:2], GREEDY), on_cpu[:2])


@pytest.mark.timeout(300)  # a process for every page
def test_any_map_that_is_left_out_is_noticed(model: Path) -> None:
    command = [sys.executable, dropped_maps.__file__, str(model)]
    environment = {**os.environ, "PYTHONPATH": str(Path(dropped_maps.__file__).parents[1])}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["maps"] >= 2 * NUM_TENSORS and told["unseen"] == []


def test_a_type_that_attention_does_not_take_is_refused(model: Path) -> None:
    from npu.dispatch import install
    from npu.operators import References

    mode = install(References())  # the vendor's: 16 bits only
    try:
        with pytest.raises(ModelError, match="float32"):
            LLM(model, device="npu", **ELASTIC)
    finally:
        mode.__exit__(None, None, None)
