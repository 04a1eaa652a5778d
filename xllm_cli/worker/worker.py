"""One rank: applies a plan's page changes, runs its rows through the model and draws their tokens.

Knows nothing of requests, prefixes or budgets; a plan says everything.
"""

from __future__ import annotations

import torch

from xllm_cli.core import Observation, Row, StepPlan, StepResult, TokenLogprob
from xllm_cli.models.batch import LayerKV
from xllm_cli.models.registry import Model
from xllm_cli.worker.inputs import build_batch
from xllm_cli.worker.kv_store import KvStore
from xllm_cli.worker.memory import MemoryObserver
from xllm_cli.worker.sampler import sample


class Worker:
    """A model with its KV store on one device."""

    def __init__(
        self, model: Model, store: KvStore, observer: MemoryObserver, *, block_size: int, num_blocks: int
    ) -> None:
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
        outcome = self._store.apply(plan.delta, plan.keep_free)
        self._observer.begin_step()
        tokens: tuple[TokenLogprob, ...] = ()
        if outcome.mapped:
            tokens = self._run(plan.rows)
            self._store.trim()
        return StepResult(
            step=plan.step,
            mapped=outcome.mapped,
            observation=self._observer.observe(),
            tokens=tokens,
            stuck=outcome.stuck,
            shortage=outcome.shortage,
        )

    def break_off(self, plan: StepPlan) -> StepResult:
        """The result of a plan that an exception ended: no token, and `stuck` are all its pages that are mapped now."""
        stuck = self._store.mapped_of((*plan.delta.map, *plan.delta.unmap))
        return StepResult(step=plan.step, mapped=False, observation=self.observe(), stuck=tuple(stuck))

    @torch.inference_mode()
    def _run(self, rows: tuple[Row, ...]) -> tuple[TokenLogprob, ...]:
        if not rows:
            return ()
        logits = self._model.forward(build_batch(rows, self._block_size), self._layers)
        return sample(logits.numpy(), [row.sampling for row in rows if row.sampling is not None])

    def close(self) -> bool:
        """Drop the views, then the store; False if pages or views are still in use."""
        self._layers.clear()
        self._observer.close()
        return self._store.close()
