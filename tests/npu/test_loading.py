"""The manual loader under the whole engine on an emulated device: staged or not, the weights are the same."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from ascendcl import Emulator

from npu.parity import prompts_of
from xllm_cli import LLM
from xllm_cli.core import SamplingParams
from xllm_cli.errors import DeviceError, MemoryShortage
from xllm_cli.worker.staging import BUFFER_BYTES

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("computing", "lazy")]
MIB = 1 << 20
DRIVER_FAILED, OUT_OF_MEMORY = 507899, 207001
FLAGS = {"device": "npu", "dtype": "float32", "max_cache_size": 64 * MIB}
ELASTIC = {"enable_vmm_kvcache": True, "vmm_elastic": True}
STAGED = ["aclrtMallocHost", "aclrtMemcpyAsync", "aclrtFreeHost"]


def answers(llm: LLM) -> list[list[int]]:
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return [answer.token_ids for answer in llm.generate(prompts_of(2), greedy)]


@pytest.fixture(scope="module")
def expected(computing: None, model: Path) -> list[list[int]]:
    """What the model answers when each tensor was copied as it was read."""
    with LLM(model, **FLAGS) as llm:
        return answers(llm)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


@pytest.mark.parametrize("more", [{}, ELASTIC], ids=["physical", "virtual KV"])
def test_the_manual_loader_needs_no_pages(
    model: Path, expected: list[list[int]], emulator: Emulator, log: pytest.LogCaptureFixture, more: dict[str, bool]
) -> None:
    with LLM(model, **FLAGS, **more, enable_manual_loader=True) as llm:
        copied, buffers, freed = [emulator.calls(function) for function in STAGED[1:2] + STAGED[::2]]
        assert copied > 10 and (buffers, freed) == (2, 2), "two buffers for as long as it reads"
        assert f"staged in {2 * BUFFER_BYTES} of pinned memory" in log.text
        assert answers(llm) == expected


@pytest.mark.parametrize("more", [{}, ELASTIC], ids=["physical", "virtual KV"])
def test_without_the_flag_nothing_is_staged(
    model: Path, expected: list[list[int]], emulator: Emulator, log: pytest.LogCaptureFixture, more: dict[str, bool]
) -> None:
    with LLM(model, **FLAGS, **more) as llm:
        assert emulator.calls("aclrtMallocHost") == 0 and "each copied as it was read" in log.text
        assert answers(llm) == expected


def test_without_pinned_memory_weights_are_copied_as_they_are_read(
    model: Path, expected: list[list[int]], emulator: Emulator, log: pytest.LogCaptureFixture
) -> None:
    emulator.inject("aclrtMallocHost", OUT_OF_MEMORY, nth=2)
    with LLM(model, **FLAGS, enable_manual_loader=True) as llm:
        assert "weights are copied as they are read: the host has no" in log.text
        assert answers(llm) == expected


@pytest.mark.parametrize("staged", [False, True])
def test_a_model_that_does_not_fit_is_a_shortage_in_one_sentence(model: Path, emulator: Emulator, staged: bool) -> None:
    torch.npu.empty_cache()
    emulator.inject("aclrtMallocAlign32", OUT_OF_MEMORY, nth=1, count=9)
    with pytest.raises(MemoryShortage, match="no memory for the model: NPU out of memory") as caught:
        LLM(model, **FLAGS, enable_manual_loader=staged)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "nth"), [("aclrtMemcpyAsync", 3), ("aclrtSynchronizeStreamWithTimeout", 20), ("aclrtMemcpy", 15)]
)
def test_a_copy_that_fails_ends_the_start_in_words_and_the_next_is_whole(
    model: Path, expected: list[list[int]], emulator: Emulator, function: str, nth: int
) -> None:
    """Before the `nth` call others belong to finding out what attention takes."""
    staged = {"enable_manual_loader": function != "aclrtMemcpy"}
    emulator.inject(function, DRIVER_FAILED, nth=nth)
    with pytest.raises(DeviceError, match=r"npu 0: .*code 507899"):
        LLM(model, **FLAGS, **staged)
    assert emulator.counters()[function].injected == 1
    with LLM(model, **FLAGS, **staged) as llm:
        assert answers(llm) == expected
