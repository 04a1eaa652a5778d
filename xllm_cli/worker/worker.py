"""One rank: applies a plan's page changes, runs its rows through the model and draws their tokens.

Knows nothing of requests, prefixes or budgets; a plan says everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from xllm_cli.core import Observation, Row, StepPlan, StepResult, TokenLogprob
from xllm_cli.models.batch import LayerKV
from xllm_cli.models.registry import Model
from xllm_cli.worker.inputs import build_batch
from xllm_cli.worker.kv_store import KvStore
from xllm_cli.worker.memory import MemoryObserver
from xllm_cli.worker.sampler import sample, score


class Worker:
    """A model with its KV store on one device. `guard` surrounds the device's work, see worker.device.Device."""

    def __init__(
        self,
        model: Model,
        store: KvStore,
        observer: MemoryObserver,
        *,
        block_size: int,
        num_blocks: int,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._guard = guard
        self._model = model
        self._store = store
        self._observer = observer
        self._block_size = block_size
        self._layers: list[LayerKV] = model.kv_views(store.tensor, block_size=block_size, num_blocks=num_blocks)

    def observe(self) -> Observation:
        """An observation outside a step."""
        return self._observer.observe()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan. Without its pages no row runs; surplus handles leave only after a step that had them."""
        started = time.perf_counter()
        outcome = self._store.apply(plan.delta, plan.keep_free)
        map_seconds = time.perf_counter() - started if plan.delta.map else None
        self._observer.begin_step()
        tokens: tuple[TokenLogprob, ...] = ()
        scores: tuple[list[TokenLogprob], ...] = ()
        if outcome.mapped and plan.rows:
            tokens, scores = self._run(plan.rows)
        if outcome.mapped:
            self._store.trim()
        return StepResult(
            step=plan.step,
            mapped=outcome.mapped,
            observation=self._observer.observe(),
            tokens=tokens,
            scores=scores,
            stuck=outcome.stuck,
            shortage=outcome.shortage,
            map_seconds=map_seconds,
        )

    def break_off(self, plan: StepPlan) -> StepResult:
        """The result of a plan that an exception ended: no token, and `stuck` are all its pages that are mapped now."""
        stuck = self._store.mapped_of((*plan.delta.map, *plan.delta.unmap))
        return StepResult(step=plan.step, mapped=False, observation=self.observe(), stuck=tuple(stuck))

    @torch.inference_mode()
    def _run(self, rows: tuple[Row, ...]) -> tuple[tuple[TokenLogprob, ...], tuple[list[TokenLogprob], ...]]:
        """(a token for each row that draws one, the scores of each row that wants them)"""
        with self._guard():
            logits = self._model.forward(build_batch(rows, self._block_size), self._layers).cpu().numpy()
        drawn = [row.sampling for row in rows if row.sampling is not None]
        scored = [row.scoring for row in rows if row.scoring is not None]
        return sample(logits[: len(drawn)], drawn), score(logits[len(drawn) :], scored)

    def close(self) -> bool:
        """Drop the views, then the store; False if pages or views are still in use."""
        self._layers.clear()
        self._observer.close()
        return self._store.close()
