"""One rank: applies a plan's page changes, runs its rows through the model and draws their tokens.

Knows nothing of requests, prefixes or budgets; a plan says everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple

import torch

from xllm_cli.core import Observation, Row, StepPlan, StepResult, TokenLogprob
from xllm_cli.errors import MemoryShortage
from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.registry import Model
from xllm_cli.worker.exhaustion import bytes_refused
from xllm_cli.worker.graphs import DecodeGraphs, GraphOptions
from xllm_cli.worker.inputs import build_batch
from xllm_cli.worker.kv_store import KvStore
from xllm_cli.worker.memory import MemoryObserver
from xllm_cli.worker.sampler import sample, score
from xllm_cli.worker.sharing import Loaded, WeightsShare


class _Ran(NamedTuple):
    """A token for each row that draws one and the scores of each row that wants them, or why the rows ran out."""

    tokens: tuple[TokenLogprob, ...] = ()
    scores: tuple[list[TokenLogprob], ...] = ()
    exhausted: str = ""


class Worker:
    """A model with its KV store on one device. `guard` surrounds the device's work, see worker.device.Device.

    `weights` are the model's, where they can leave its pages; while they are away no row may run.
    """

    def __init__(  # noqa: PLR0913 - the parts of a rank
        self,
        model: Model,
        store: KvStore,
        observer: MemoryObserver,
        *,
        block_size: int,
        num_blocks: int,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
        weights: WeightsShare | None = None,
    ) -> None:
        self._guard = guard
        self.weights = weights
        self._graphs: DecodeGraphs | None = None
        self._captured: GraphOptions | None = None
        self._model = model
        self._store = store
        self.observer = observer
        self._block_size = block_size
        self._layers: list[LayerKV] = model.kv_views(store.tensor, block_size=block_size, num_blocks=num_blocks)

    def capture(self, options: GraphOptions) -> None:
        """Capture decode steps, which are replayed from now on. Block 0 must be padding, and mapped.

        MemoryShortage if the device has no memory for them.
        """
        self._graphs = self._capture(self._model, options)
        self._captured = options

    def _capture(self, model: Model, options: GraphOptions) -> DecodeGraphs:
        with ExitStack() as undo:
            try:
                with self._guard():
                    graphs = DecodeGraphs(model, self._layers, options)
                    undo.callback(graphs.close)
                    graphs.capture()
            except torch.OutOfMemoryError as error:
                sizes = ", ".join(map(str, options.sizes))
                raise MemoryShortage(
                    f"the device has no memory to capture decode steps of {sizes} sequences: {error}. Lower "
                    "--acl_graph_decode_batch_size_limit, or leave --enable_graph out"
                ) from error
            undo.pop_all()
        return graphs

    def observe(self) -> Observation:
        """An observation outside a step: what happened since the last one, such as a model that woke, was none."""
        self.observer.begin_step()
        return self.observer.observe()

    def relieve(self) -> int:
        """Bytes that the device got back of what an allocator only cached."""
        return self.observer.relieve()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan. Without its pages no row runs; surplus handles leave only after a step that had them."""
        started = time.perf_counter()
        outcome = self._store.apply(plan.delta, plan.keep_free)
        map_seconds = time.perf_counter() - started if plan.delta.map else None
        self.observer.begin_step()
        ran = self._attempt(plan.rows) if outcome.mapped and plan.rows else _Ran()
        if outcome.mapped:
            self._store.trim()
        return StepResult(
            step=plan.step,
            mapped=outcome.mapped,
            observation=self._look(plan),
            tokens=ran.tokens,
            scores=ran.scores,
            stuck=outcome.stuck,
            shortage=outcome.shortage,
            exhausted=ran.exhausted,
            map_seconds=map_seconds,
        )

    def _look(self, plan: StepPlan) -> Observation:
        """What is free, once what an allocator only caches has been given back if it was short."""
        seen = self.observer.observe()
        if (plan.short or seen.free < plan.keep_free) and self.observer.relieve():
            return self.observer.observe()
        return seen

    def break_off(self, plan: StepPlan) -> StepResult:
        """The result of a plan that an exception ended: no token, and `stuck` are all its pages that are mapped now."""
        stuck = self._store.mapped_of((*plan.delta.map, *plan.delta.unmap))
        return StepResult(step=plan.step, mapped=False, observation=self.observe(), stuck=tuple(stuck))

    def _attempt(self, rows: tuple[Row, ...]) -> _Ran:
        """Run the rows, or say that the device's memory ran out. Every other error is the caller's."""
        try:
            return self._run(rows)
        except (RuntimeError, MemoryError) as error:
            refused = bytes_refused(error)
            if refused is None:
                raise
            self.observer.exhausted(refused)
            return _Ran(exhausted=str(error).split("\n", maxsplit=1)[0] or type(error).__name__)

    @torch.inference_mode()
    def _run(self, rows: tuple[Row, ...]) -> _Ran:
        with self._guard():
            logits = self._forward(build_batch(rows, self._block_size)).cpu().numpy()
        drawn = [row.sampling for row in rows if row.sampling is not None]
        scored = [row.scoring for row in rows if row.scoring is not None]
        return _Ran(sample(logits[: len(drawn)], drawn), score(logits[len(drawn) :], scored))

    def _forward(self, batch: Batch) -> torch.Tensor:
        logits = None if self._graphs is None else self._graphs.forward(batch)
        return self._model.forward(batch, self._layers) if logits is None else logits

    def exchange(self, loaded: Loaded) -> None:
        """Run another model of the same form from now on; steps that were captured are captured anew, with its
        addresses. The weights of the old one are the caller's to let go. MemoryShortage or DeviceError as capture():
        nothing has changed then."""
        if self._captured is not None:
            old, self._graphs = self._graphs, self._capture(loaded.model, self._captured)
            if old is not None:
                old.close()
        self._model, self.weights = loaded

    def close(self) -> bool:
        """Drop graphs and views, then the store; False if pages or views are still in use: call it again then."""
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None  # it knows the model
        self._layers.clear()
        self.observer.close()
        if self.weights is None:
            return self._store.close()
        self.__dict__.pop("_model", None)  # its tensors look at the pages of the weights
        return all([self.weights.close(), self._store.close()])
