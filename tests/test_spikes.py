"""Execution spikes recorded from a real model, played back on a simulated accelerator whose KV cache is always wanted.

The trace (data/execution_spikes.json) holds (tokens, rows, bytes) of steps of SmolLM2-135M on one core; a step here
needs what the recorded step nearest in tokens needed. Two numbers count: steps that ran out, and budget that lay idle.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from simulated import spike

from xllm_cli.cache.budget import Limits
from xllm_cli.cache.manager import CacheManager
from xllm_cli.core import CacheSpec, Request, SamplingParams, StepPlan, StepResult, TensorSpec
from xllm_cli.engine.scheduler import Scheduler, StepLimits
from xllm_cli.engine.sequence import Sequence
from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.registry import Model
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.driver import open_driver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.vmm.simulated import SimulatedAllocator, SimulatedDriver
from xllm_cli.worker.kv_store import VirtualKvStore
from xllm_cli.worker.memory import DeviceMemoryObserver
from xllm_cli.worker.worker import Worker

MIB = 1 << 20
TOTAL, PAGE, BLOCK = 64 * MIB, 64 << 10, 16
SPEC = CacheSpec(BLOCK, (TensorSpec("kv", 40 << 10),))
TRACE: list[tuple[int, int, int]] = json.loads((Path(__file__).parent / "data" / "execution_spikes.json").read_text())[
    "steps"
]
LARGEST = max(nbytes for _, _, nbytes in TRACE)


class Nothing:
    """A model without layers that always says token 1."""

    def kv_views(self, *args: Any, **kwargs: Any) -> list[LayerKV]:
        return []

    def forward(self, batch: Batch, kv: list[LayerKV]) -> torch.Tensor:
        return torch.tensor([[0.0, 1.0]]).expand(len(batch.logit_rows), 2)


class Device:
    """Scheduler, cache and worker on one simulated accelerator; `share` of it is what the largest spike needs."""

    def __init__(self, share: float, reserve: int = 0) -> None:
        self.driver = SimulatedDriver(open_driver("cpu", mode="4k", page_bytes=PAGE), total_bytes=TOTAL)
        self.allocator = SimulatedAllocator(self.driver, segment_bytes=PAGE)
        self.scale = share * TOTAL / LARGEST
        self.spike = 0
        pool = PagePool(self.driver, page_bytes=PAGE)
        store = VirtualKvStore([Arena(self.driver, pool, TOTAL)], pool, PAGE, fence=lambda: None)
        observer = DeviceMemoryObserver(self.driver, store, self.allocator)
        blocks = TOTAL // SPEC.bytes_per_block
        model = cast(Model, Nothing())
        self.worker = Worker(model, store, observer, block_size=BLOCK, num_blocks=blocks, guard=self.step_memory)
        limits = Limits(arena_bytes=TOTAL, reserve=reserve, host=False)
        self.cache = CacheManager(SPEC, limits=limits, page_bytes=PAGE, prefix_seed=None, num_blocks=blocks)
        self.cache.observe(self.worker.observe())
        self.scheduler = Scheduler(self.cache, StepLimits(tokens=512, sequences=1024, chunk=512, prefill=512))

    @contextmanager
    def step_memory(self) -> Iterator[None]:
        with spike(self.allocator, self.spike):
            yield

    def run(self, plan: StepPlan) -> StepResult:
        tokens = sum(len(row.token_ids) for row in plan.rows)
        nearest = min(TRACE, key=lambda step: abs(step[0] - tokens))
        self.spike = round(nearest[2] * self.scale) if tokens else 0
        result = self.worker.execute(plan)
        if result.exhausted:
            self.scheduler.break_off(plan, result)
        elif result.mapped:
            self.scheduler.commit(plan, result)
        else:
            self.scheduler.rollback(plan, result)
        return result

    def idle_share(self) -> float:
        """Of the device: what is neither KV nor what the largest step of the trace needs besides what is cached."""
        cached = self.allocator.reserved() - self.allocator.allocated()
        needed = max(0, round(LARGEST * self.scale) - cached)
        return max(0, self.driver.info().free - needed) / TOTAL


def requests(rng: random.Random) -> Iterator[Sequence]:
    """More than memory will hold, of mixed sizes."""
    number = 0
    while True:
        number += 1
        prompt, most = rng.choice((20, 60, 150, 300, 600)), rng.randrange(5, 200)
        wanted = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        request = Request(request_id=str(number), prompt_ids=[1] * prompt, sampling=wanted)
        yield Sequence(number, request, cast(Any, None), most, 0)


@pytest.mark.parametrize("share", [0.01, 0.03, 0.10])
def test_no_step_runs_out_and_hardly_any_budget_lies_idle(share: float):
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    device, arriving = Device(share), requests(random.Random(seed))
    idle: list[float] = []
    now = 0.0
    for step in range(300):
        while len(device.scheduler.waiting) < 4:
            sequence = next(arriving)
            sequence.table = device.cache.open()
            device.scheduler.add(sequence)
        plan = device.scheduler.plan(now)
        device.run(plan)
        now += 0.02
        if step > 60 and device.scheduler.short_bytes:
            idle.append(device.idle_share())
    device.cache.check()
    print(f"idle: mean {sum(idle) / len(idle):.4f}, most {max(idle):.4f}, over {len(idle)} steps that were short")
    assert (device.allocator.num_failures, device.scheduler.totals.exhausted_steps) == (0, 0)
    assert len(idle) > 100
    assert sum(idle) / len(idle) <= 0.02
