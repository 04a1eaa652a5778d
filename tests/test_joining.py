"""What a model that joins others does before it serves: no more than is new, and within what there is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from checkpoints import tiny_checkpoint
from pool_models import PAGE, Models, alone, answers, closing_clean, driver_of, hosted, open_llm
from test_models_pool import run_all, submit

from xllm_cli.cache.manager import CacheManager
from xllm_cli.core import StepPlan, StepResult
from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.decoder import Decoder
from xllm_cli.worker.worker import Worker

LLAMA, QWEN, MISTRAL = (tiny_checkpoint(name) for name in ("llama", "qwen3", "mistral"))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of every forward pass."""
    seen, forward = list[int](), Decoder.forward

    def record(self: Decoder, batch: Batch, kv: list[LayerKV]) -> torch.Tensor:
        seen.append(batch.token_ids.numel())
        return forward(self, batch, kv)

    monkeypatch.setattr(Decoder, "forward", record)
    yield seen


def test_a_twin_runs_nothing_before_it_serves_and_another_model_as_much_as_the_first(passes: list[int]) -> None:
    with closing_clean(open_llm("elastic")) as llm:
        first = passes.copy()
        models = Models(llm)
        models.fork("twin", LLAMA)
        assert passes == first
        models.fork("other", QWEN)
        assert passes == first * 2 and first == [64, 1]
        assert answers(llm, "twin") == alone(LLAMA).answers and answers(llm, "other") == alone(QWEN).answers


def test_a_twin_knows_what_a_step_needs() -> None:
    with closing_clean(open_llm("elastic")) as llm:
        answers(llm)
        llm.host.fork("twin", str(LLAMA))
        twin, first = (hosted(llm)[name].cache.observations[0] for name in ("twin", "llama"))
        assert twin.execution_peak == first.execution_peak > 0
        llm.engine._group.observer.exhausted(1 << 24)  # type: ignore[attr-defined]
        for model in hosted(llm).values():
            model.engine.look()
        assert hosted(llm)["twin"].cache.observations[0].execution_room >= 1 << 24


def test_a_warm_up_stays_within_what_all_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing_clean(open_llm("elastic", max_cache_size=PAGE)) as llm:
        submit(llm, "long", "", tokens=40)
        llm.host.step()
        seen, execute = list[int](), Worker.execute

        def watch(self: Worker, plan: StepPlan) -> StepResult:
            result = execute(self, plan)
            seen.append(driver_of(llm).usage()["mapped"] * PAGE)
            return result

        monkeypatch.setattr(Worker, "execute", watch)
        llm.host.fork("other", str(QWEN))
        weights = sum(model.weight_bytes for model in hosted(llm).values())
        assert weights < max(seen) <= weights + PAGE
        assert run_all(llm)["long"].finish == "length"


def test_without_memory_for_it_nobody_stands_still(passes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with closing_clean(open_llm("elastic")) as llm:
        llm.host.set_limit(0)
        steps, plan_delta = [0], CacheManager.plan_delta

        def count(self: CacheManager, now: float) -> object:
            steps[0] += 1
            return plan_delta(self, now)

        monkeypatch.setattr(CacheManager, "plan_delta", count)
        before = len(passes)
        llm.host.fork("other", str(MISTRAL))
        assert len(passes) == before and steps[0] <= 4
        assert hosted(llm)["other"].cache.limits.limit == 0
        llm.host.set_limit(None)
        assert answers(llm, "other") == alone(MISTRAL).answers
