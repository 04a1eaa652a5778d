"""Decode steps captured once and replayed: one launch in place of hundreds.

A graph holds addresses, of weights, of its inputs and of the KV arenas, and re-runs what was captured on whatever
stands there. So the inputs are tensors that stay, and a replay is: fill them, rebind the lengths that attention takes
from the host, launch. KV pages may come and go meanwhile, for a page is named by nothing but the block table, an input.

    rows      0 … R-1          R … N-1 (padding, N the graph's size)
    slots     as planned       row i writes slot i
    table     its blocks, 0    block 0, which is padding for ever and always mapped
    context   as planned       1

Knows no pages and no requests. `runtime` is the part of torch.npu that captures.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.registry import Model

log = logging.getLogger("xllm.worker")


class Graph(Protocol):
    """A captured step (torch.npu.NPUGraph)."""

    def update(self, cpu_update_input: list[dict[str, list[int]]]) -> None:
        """Give captured operators other host arguments, by name: one dictionary stands for all of them."""
        ...

    def replay(self) -> None:
        """Launch what was captured."""
        ...

    def reset(self) -> None:
        """Give up the graph and its memory."""
        ...


class GraphRuntime(Protocol):
    """What torch.npu has for graphs."""

    def NPUGraph(self) -> Graph:  # noqa: N802 - the vendor's name
        """An empty graph."""
        ...

    def graph(self, npu_graph: Graph, *, pool: Any, auto_dispatch_capture: bool) -> AbstractContextManager[Any]:
        """Capture what runs inside; with auto_dispatch_capture attention's host arguments can be updated."""
        ...

    def graph_pool_handle(self) -> Any:
        """A pool of memory that graphs may share, for only one of them runs at a time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """Which decode steps are captured, of how many sequences and how long a context in tokens."""

    runtime: GraphRuntime
    sizes: tuple[int, ...]
    max_context: int


def graph_sizes(limit: int, *, max_tokens: int = 0, exact: bool = False, rows: int) -> tuple[int, ...]:
    """Batch sizes to capture up to `limit`: 1, 2, 4, 8, then every 16; with `exact` every size.

    `max_tokens` bounds a step too (0: no bound), and so does `rows`: the sequences of a step, and the slots of block 0.
    """
    limit = min(limit, rows, max_tokens or limit)
    if exact:
        return tuple(range(1, limit + 1))
    sizes = [size for size in (1, 2, 4, 8, *range(16, limit + 16, 16)) if size < limit]
    return (*sizes, limit) if limit > 0 else ()


class StaticInputs:
    """The tensors that graphs read, for up to `rows` sequences; host copies are filled first, then sent."""

    def __init__(self, rows: int, max_blocks: int, device: torch.device) -> None:
        self._host = [
            torch.zeros(rows, dtype=torch.int64),
            torch.zeros(rows, dtype=torch.int32),
            torch.arange(rows, dtype=torch.int64),
            torch.zeros((rows, max_blocks), dtype=torch.int32),
        ]
        self._device = [tensor.to(device, copy=True) for tensor in self._host]
        self._ends = torch.arange(rows + 1, dtype=torch.int32)
        self._rows = torch.arange(rows, dtype=torch.int64)
        self._rows_there = self._rows.to(device)

    def batch(self, size: int, context: int) -> Batch:
        """The first `size` rows as a batch of one token each, all with `context` tokens of KV."""
        token_ids, positions, slots, tables = (tensor[:size] for tensor in self._device)
        return Batch(
            token_ids=token_ids,
            positions=positions,
            query_starts=self._ends[: size + 1],
            context_lens=torch.full((size,), context, dtype=torch.int32),
            block_tables=tables,
            slots=slots,
            logit_rows=self._rows_there[:size],
        )

    def is_decode(self, batch: Batch) -> bool:
        """Whether every sequence of `batch` has one token and wants its logits."""
        count = batch.context_lens.shape[0]
        return batch.token_ids.shape[0] == count and torch.equal(batch.logit_rows, self._rows[:count])

    def fill(self, batch: Batch, size: int) -> None:
        """Make the first rows those of `batch`, the others up to `size` padding."""
        count = batch.token_ids.shape[0]
        token_ids, positions, slots, tables = self._host
        for host, given in ((token_ids, batch.token_ids), (positions, batch.positions)):
            host[:count] = given
            host[count:size] = 0
        slots[:count], slots[count:size] = batch.slots, self._rows[count:size]
        tables[:size] = 0
        tables[:count, : batch.block_tables.shape[1]] = batch.block_tables
        for host, there in zip(self._host, self._device, strict=True):
            there[:size].copy_(host[:size])


@dataclass(slots=True)
class _Captured:
    graph: Graph
    logits: torch.Tensor


class DecodeGraphs:
    """The captured decode steps of one model. Block 0 must be padding, and mapped whenever a graph runs."""

    def __init__(self, model: Model, layers: Sequence[LayerKV], options: GraphOptions) -> None:
        self._model = model
        self._layers = list(layers)
        self._options = options
        self._graphs: dict[int, _Captured] = {}
        first = self._layers[0]
        largest = max(options.sizes)
        assert largest <= first.block_size, "padding row i writes slot i of block 0"
        self._inputs = StaticInputs(largest, -(-options.max_context // first.block_size), first.k.device)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, the largest first: the smaller ones then fit into its memory."""
        pool = self._options.runtime.graph_pool_handle()
        for size in sorted(self._options.sizes, reverse=True):
            self._graphs[size] = self._capture(size, pool)
        log.info("captured decode steps of %s sequences", ", ".join(map(str, self._options.sizes)))

    def _capture(self, size: int, pool: Any) -> _Captured:
        self._model.forward(self._inputs.batch(size, 1), self._layers)  # whatever is set up at first use, is now
        graph = self._options.runtime.NPUGraph()
        batch = self._inputs.batch(size, self._longest(size))  # attention's workspace is sized at capture
        with self._options.runtime.graph(graph, pool=pool, auto_dispatch_capture=True):
            logits = self._model.forward(batch, self._layers)
        return _Captured(graph, logits)

    def _longest(self, size: int) -> int:
        """Tokens that each of `size` sequences can have: attention takes no more blocks in all than there are."""
        cache = self._layers[0]
        return min(self._options.max_context, max(1, cache.k.shape[0] // size) * cache.block_size)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor | None:
        """The batch's logits, valid until the next call; None if no graph fits: it is no decode, or too large."""
        count = batch.context_lens.shape[0]
        size = next(self._at_least(count), None)
        if size is None or not self._inputs.is_decode(batch):
            return None
        captured = self._graphs[size]
        self._inputs.fill(batch, size)
        lengths = batch.context_lens.tolist() + [1] * (size - count)
        captured.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
        captured.graph.replay()
        return captured.logits[:count]

    def _at_least(self, count: int) -> Iterator[int]:
        return (size for size in self._options.sizes if size >= count and size in self._graphs)

    def close(self) -> None:
        """Give up the graphs and the views of the cache; the device must be idle."""
        for captured in self._graphs.values():
            captured.graph.reset()
        self._graphs.clear()
        self._layers.clear()
