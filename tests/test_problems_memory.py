"""Faults of memory that users of such systems met: each is done to a real engine here, on a simulated accelerator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checkpoints import tiny_checkpoint
from simulated import MIB, Accelerator

from xllm_cli import LLM
from xllm_cli.core import SamplingParams
from xllm_cli.engine.slumber import Bed
from xllm_cli.vmm.driver import open_driver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.vmm.weights import WeightArena

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


PAGE, PAGES = 4096, 20


def break_off_a_filling(arena: WeightArena) -> None:
    """Its pages leave again, perhaps in the middle of a copy."""

    def fill(chunk: torch.Tensor, offset: int) -> None:
        raise OSError("the disk fails")

    arena.discard()
    with pytest.raises(OSError, match="the disk fails"):
        arena.restore(fill)


LEAVING: dict[str, Callable[[WeightArena], object]] = {
    "park": WeightArena.park,
    "discard": WeightArena.discard,
    "close": WeightArena.close,
    "a filling that fails": break_off_a_filling,
}


@pytest.mark.parametrize("way", LEAVING)
def test_pages_of_weights_leave_only_after_the_work_on_them(way: str) -> None:
    driver = open_driver("cpu", page_bytes=PAGE)
    pool, seen = PagePool(driver, page_bytes=PAGE), []
    arena = WeightArena(driver, pool, PAGES * PAGE, fence=lambda: seen.append(driver.usage()["mapped"]))
    arena.take([PAGES * PAGE // 4], torch.float32)
    LEAVING[way](arena)
    assert seen[0] == PAGES and all(seen), "the device is waited for while the pages are still there"
    assert len(seen) == (2 if "fails" in way else 1)
    assert arena.close()
    pool.close()


@pytest.mark.parametrize("verb", ["fork", "update"])
def test_so_do_weights_that_are_read_anew(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    accelerator = Accelerator(64 * MIB)
    with accelerator.serve(monkeypatch, enable_vmm_weights=True) as llm:
        expected = tokens(llm)
        accelerator.allocator.allocate(TEMPORARY)
        accelerator.allocator.free(TEMPORARY)
        assert accelerator.device.take(accelerator.driver.info().free)
        if verb == "fork":
            llm.host.fork("other", str(tiny_checkpoint("qwen3")))
        else:
            llm.host.update("llama")
        assert tokens(llm) == expected and accelerator.allocator.num_emptied == 1
