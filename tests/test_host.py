"""How large a cache becomes, what refuses to start, and what a start that fails leaves behind: nothing."""

from __future__ import annotations

import pytest
import torch
from checkpoints import tiny_checkpoint

from xllm_cli import LLM
from xllm_cli.config import make_config
from xllm_cli.core import CacheSpec, TensorSpec
from xllm_cli.engine.sizes import size_cache
from xllm_cli.errors import DeviceError, MemoryShortage, XllmError
from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.decoder import Decoder
from xllm_cli.vmm.driver import FaultyDriver, open_driver

MIB = 1 << 20
TOTAL = 512 * MIB
PAGE = 65536
SPEC = CacheSpec(16, (TensorSpec("kv", 48 << 10),))
ELASTIC = {"enable_vmm_kvcache": True, "vmm_elastic": True}
FIXED = {"enable_vmm_kvcache": True}


@pytest.mark.parametrize(
    ("flags", "arena", "is_fixed"),
    [
        (ELASTIC, TOTAL, False),
        ({**ELASTIC, "max_memory_utilization": 0.0}, TOTAL, False),
        ({**ELASTIC, "max_memory_utilization": 0.5}, TOTAL // 2, False),
        ({**ELASTIC, "max_memory_utilization": 0.5, "max_cache_size": 8 * MIB}, TOTAL // 2, False),
        (FIXED, int(TOTAL * 0.8) // PAGE * PAGE, True),
        ({**FIXED, "max_memory_utilization": 0.5}, TOTAL // 2, True),
        ({**FIXED, "max_cache_size": 8 * MIB}, 8 * MIB, True),
        ({**FIXED, "max_memory_utilization": 0.0, "max_cache_size": TOTAL}, TOTAL - 64 * MIB, True),
        ({}, int(TOTAL * 0.8), False),
        ({"max_memory_utilization": 0.5, "max_cache_size": 8 * MIB}, 8 * MIB, False),
        ({"max_memory_utilization": 0.0, "max_cache_size": TOTAL}, TOTAL - 64 * MIB, False),
    ],
)
def test_the_arena_follows_ratio_and_cap(flags: dict, arena: int, is_fixed: bool):
    info = open_driver("cpu", mode="4k", page_bytes=PAGE, total_bytes=TOTAL).info()
    assert info.free == TOTAL
    size = size_cache(make_config(**flags), SPEC, info)
    assert size.arena_bytes == arena
    assert size.num_blocks == arena // SPEC.bytes_per_block
    assert size.pool_pages == (arena // PAGE if is_fixed else None)


@pytest.mark.parametrize("flags", [ELASTIC, FIXED, {}], ids=["elastic", "fixed", "physical"])
def test_less_than_one_block_ends_the_start_with_4_and_the_numbers(flags: dict):
    with pytest.raises(MemoryShortage) as caught:
        LLM(tiny_checkpoint("llama"), dtype="float32", max_cache_size=4096, **flags)
    assert caught.value.exit_code == 4
    text = str(caught.value)
    assert "98304" in text  # a block of 128 tokens
    assert "--max_cache_size" in text
    assert ("4096" if flags != FIXED else " 0 bytes") in text


def test_less_than_one_page_ends_the_start_and_leaves_nothing_open():
    driver = open_driver("cpu", mode="4k")
    with pytest.raises(MemoryShortage, match="pages of 2097152"):
        LLM(tiny_checkpoint("llama"), driver=driver, max_cache_size=MIB, **ELASTIC)
    assert (driver.usage()["ranges"], driver.usage()["handles"]) == (0, 0)


@pytest.mark.parametrize(("shortage", "kind"), [(True, MemoryShortage), (False, DeviceError)])
@pytest.mark.parametrize("verb", ["create", "reserve", "map"])
def test_a_driver_that_fails_at_the_start_leaves_no_page_behind(verb: str, shortage: bool, kind: type[XllmError]):
    driver = FaultyDriver(open_driver("cpu", mode="4k", page_bytes=PAGE))
    driver.fail(verb, 1, shortage)
    if verb == "map":  # in the warm-up: a step that is short, tried again
        with LLM(tiny_checkpoint("llama"), driver=driver, max_cache_size=8 * MIB, **FIXED) as llm:
            assert llm.memory()["physical"] == 8 * MIB
    else:
        with pytest.raises(kind):
            LLM(tiny_checkpoint("llama"), driver=driver, max_cache_size=8 * MIB, **FIXED)
    assert (driver.usage()["ranges"], driver.usage()["handles"]) == (0, 0)


def test_every_kind_of_cache_is_warmed_up_by_the_same_forward_passes(monkeypatch):
    shapes: list[list[tuple[int, int, bool]]] = []
    forward = Decoder.forward

    def record(self: Decoder, batch: Batch, kv: list[LayerKV]) -> torch.Tensor:
        shapes[-1].append((batch.token_ids.numel(), batch.logit_rows.numel(), batch.token_ids.is_contiguous()))
        return forward(self, batch, kv)

    monkeypatch.setattr(Decoder, "forward", record)
    for flags in (ELASTIC, FIXED, {}):
        shapes.append([])
        with LLM(tiny_checkpoint("llama"), dtype="float32", max_cache_size=32 * MIB, **flags):
            pass
    assert shapes[0] == shapes[1] == shapes[2]
    assert len(shapes[0]) == 2  # a prompt and one decode: elastic memory adds nothing to warm up
