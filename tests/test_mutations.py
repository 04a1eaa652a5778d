"""The suite is able to fail: a kernel broken on purpose makes the comparison over poisoned pages fail.

A store that forgets its undo is in test_faults.py, one that forgets its fence in test_kv_store.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import tiny_checkpoint

from xllm_cli import LLM
from xllm_cli.core import SamplingParams
from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.ops.base import Heads
from xllm_cli.models.ops.cpu import CpuOps
from xllm_cli.vmm.driver import open_driver

PAGE = 64 << 10
FLAGS = {
    "dtype": "float32",
    "block_size": 16,
    "enable_vmm_kvcache": True,
    "vmm_elastic": True,
    "phy_page_granularity_size": PAGE,
    "max_cache_size": 16 << 20,
}
NAN_BYTES = 0xFF  # 0xFFFF… is NaN in bfloat16 and in float32


def answers(poison: int | None) -> list[list[int]]:
    """Tokens of a small load whose fresh pages hold zeros or NaN."""
    driver = open_driver("cpu", mode="4k", page_bytes=PAGE, poison=poison)
    wanted = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    prompts = [[(17 * i + 3 * j) % 250 for j in range(40 + i)] for i in range(5)]
    with LLM(tiny_checkpoint("llama"), driver=driver, **FLAGS) as llm:
        return [answer.token_ids for answer in llm.generate(prompts, wanted)]


def test_a_sound_kernel_reads_no_fresh_page():
    assert answers(NAN_BYTES) == answers(None)


def test_a_kernel_that_reads_one_position_too_far_is_caught(monkeypatch: pytest.MonkeyPatch):
    sound = CpuOps.attention

    def too_far(
        self: CpuOps, qkv: torch.Tensor, kv: LayerKV, batch: Batch, heads: Heads, **options: float | None
    ) -> torch.Tensor:
        tables = torch.nn.functional.pad(batch.block_tables, (0, 1))
        wider = replace(batch, context_lens=batch.context_lens + 1, block_tables=tables)
        return sound(self, qkv, kv, wider, heads, **options)

    right = answers(None)
    monkeypatch.setattr(CpuOps, "attention", too_far)
    poisoned = answers(NAN_BYTES)
    assert poisoned != right
    assert poisoned != answers(None)
