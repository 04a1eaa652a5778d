"""Models that leave the pool of an emulated device: padding blocks, captured steps and pinned copies go with them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from ascendcl import Emulator

from npu.parity import prompts_of
from npu.small_model import NUM_TENSORS, write_small_model
from xllm_cli import LLM
from xllm_cli.core import SamplingParams
from xllm_cli.engine.slumber import Bed
from xllm_cli.errors import RequestError

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("computing")]
MIB = 1 << 20
DRIVER_FAILED = 507899
FLAGS: dict[str, Any] = {
    "device": "npu", "dtype": "float32", "enable_vmm_weights": True, "enable_vmm_kvcache": True, "vmm_elastic": True,
    "max_cache_size": 32 * MIB,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPTS = prompts_of(2)


def answers(llm: LLM, name: str = "") -> list[list[int]]:
    found = llm.generate(PROMPTS, GREEDY, model=name)
    assert not any(answer.error for answer in found), [answer.error for answer in found]
    return [answer.token_ids for answer in found]


def held(llm: LLM, emulator: Emulator) -> int:
    """Bytes of pages that the driver has of the device, spares gone."""
    llm.host.trim()
    llm.idle()
    return sum(handle["bytes"] for handle in emulator.leaks().get("handles", []))


@pytest.mark.parametrize("graphs", [{}, {"enable_graph": True, "acl_graph_decode_batch_size_limit": 2}])
@pytest.mark.parametrize("bed", [None, Bed(1), Bed(1, park=True)])
def test_who_leaves_leaves_nothing(model: Path, emulator: Emulator, bed: Bed | None, graphs: Any) -> None:
    with LLM(model, **FLAGS, **graphs) as llm:
        right = answers(llm)
        before, ranges = held(llm, emulator), len(emulator.leaks().get("ranges", []))
        for _ in range(2):
            llm.host.fork("twin", str(model))
            assert answers(llm, "twin") == right
            if bed is not None:
                llm.host.engine("twin").sleep(bed)
            llm.host.remove("twin")
            assert held(llm, emulator) == before and len(emulator.leaks().get("ranges", [])) == ranges
            assert answers(llm) == right
            llm.host.check()


def test_refused_it_stays_and_leaves_when_asked_again(model: Path, tmp_path: Path, emulator: Emulator) -> None:
    with LLM(model, **FLAGS) as llm:
        before = held(llm, emulator)
        llm.host.fork("other", str(write_small_model(tmp_path / "other", seed=6)))
        right = answers(llm, "other")
        emulator.reset()
        emulator.inject("aclrtUnmapMem", DRIVER_FAILED, nth=1)
        with pytest.raises(RequestError) as refused:
            llm.host.remove("other")
        assert (refused.value.status, refused.value.code) == (503, "remove_failed")
        assert answers(llm, "other") == right
        assert llm.host.remove("other") == "" and held(llm, emulator) == before


def test_a_padding_block_that_stays_is_told_of_and_tried_again(model: Path, emulator: Emulator) -> None:
    with LLM(model, **FLAGS) as llm:
        right, before = answers(llm), held(llm, emulator)
        llm.host.fork("twin", str(model))
        emulator.reset()
        emulator.inject("aclrtUnmapMem", DRIVER_FAILED, nth=1)
        assert llm.host.remove("twin") == "" and emulator.counters()["aclrtUnmapMem"].injected == 1, "at once again"
        llm.host.fork("twin", str(model))
        emulator.reset()
        for nth in (1, NUM_TENSORS + 1):
            emulator.inject("aclrtUnmapMem", DRIVER_FAILED, nth=nth)
        assert "are tried again" in llm.host.remove("twin")
        while held(llm, emulator) != before:
            time.sleep(0.1)
        assert answers(llm) == right
