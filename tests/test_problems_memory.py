"""Faults of memory that users of such systems met: each is done to a real engine here, on a simulated accelerator."""

from __future__ import annotations

import pytest
from simulated import MIB, Accelerator

from xllm_cli import LLM
from xllm_cli.core import SamplingParams
from xllm_cli.engine.slumber import Bed

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
TEMPORARY = 8 * MIB


def tokens(llm: LLM) -> list[int]:
    (answer,) = llm.generate([[7, 8, 9] * 20], GREEDY)
    assert answer.error is None, answer.error
    return answer.token_ids


@pytest.mark.parametrize("is_ordered", [True, False], ids=["ordered", "for a request"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_up_gets_what_an_allocator_only_caches(
    monkeypatch: pytest.MonkeyPatch, level: int, is_ordered: bool
) -> None:
    accelerator = Accelerator(64 * MIB)
    with accelerator.serve(monkeypatch, enable_vmm_weights=True, auto_wake=True) as llm:
        expected = tokens(llm)
        llm.engine.sleep(Bed(level))
        accelerator.allocator.allocate(TEMPORARY)
        accelerator.allocator.free(TEMPORARY)
        assert accelerator.device.take(accelerator.driver.info().free), "all that is free is a neighbour's"
        if is_ordered:
            llm.engine.wake()
        assert tokens(llm) == expected and accelerator.allocator.num_emptied == 1
