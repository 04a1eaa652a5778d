"""Decode graphs: captured steps give the tokens of steps that run, while pages come and go under them.

The graphs are the emulated ones (tests/npu/graphs.py), which make the captured calls again on the same memory.
"""

from __future__ import annotations

import pytest
import torch
from checkpoints import tiny_checkpoint
from driver_kinds import is_accessible
from model_runs import answers, build
from npu.graphs import CaptureError, EmulatedGraph, EmulatedGraphs
from npu.operators import FLOATS, References
from paged import batch_of, poisoned_kv

from xllm_cli.core import PageDelta, PageRef
from xllm_cli.models.batch import LayerKV
from xllm_cli.models.decoder import Decoder
from xllm_cli.models.ops.npu import NpuOps
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.driver import open_driver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.worker.graphs import DecodeGraphs, GraphOptions, StaticInputs, graph_sizes
from xllm_cli.worker.kv_store import VirtualKvStore

BLOCK = 128


def options(sizes: tuple[int, ...], max_context: int = 256) -> GraphOptions:
    return GraphOptions(runtime=EmulatedGraphs(), sizes=sizes, max_context=max_context)


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3_text"])
def model(request: pytest.FixtureRequest) -> Decoder:
    return build(tiny_checkpoint(request.param), "float32", NpuOps(operators=References(attention_dtypes=FLOATS)))


@pytest.fixture
def kv(model: Decoder) -> list[LayerKV]:
    """Ten blocks of NaN."""
    return poisoned_kv(model, 10, BLOCK, "token_major")


def captured(model: Decoder, kv: list[LayerKV], sizes: tuple[int, ...]) -> DecodeGraphs:
    graphs = DecodeGraphs(model, kv, options(sizes))
    graphs.capture()
    return graphs


def prefill(model: Decoder, kv: list[LayerKV], prompts: list[list[int]]) -> list[int]:
    """The first token of each; sequence i has block 1 + i."""
    rows = [(ids, 0, [1 + i]) for i, ids in enumerate(prompts)]
    ends = torch.tensor([len(ids) for ids in prompts]).cumsum(0) - 1
    return model.forward(batch_of(rows, BLOCK), kv)[ends].argmax(-1).tolist()


def test_tokens_are_those_of_steps_that_run(model: Decoder, kv: list[LayerKV]) -> None:
    graphs, eager_kv = captured(model, kv, (1, 2, 4)), poisoned_kv(model, 10, BLOCK, "token_major")
    prompts = [[5, 6, 7], list(range(40)), [9]]
    tokens = prefill(model, kv, prompts)
    assert tokens == prefill(model, eager_kv, prompts)
    for step in range(12):
        rows = [([token], len(prompts[i]) + step, [1 + i]) for i, token in enumerate(tokens)]
        logits = graphs.forward(batch_of(rows, BLOCK))
        expected = model.forward(batch_of(rows, BLOCK), eager_kv)
        assert logits is not None and (logits - expected).abs().max() <= 1e-5  # other sums: the graph has a row more
        tokens = expected.argmax(-1).tolist()


def test_tokens_are_the_oracles(model: Decoder, kv: list[LayerKV]) -> None:
    """Token by token from the first, all prompts side by side, each leaving when it ends: graphs of 4 and 2."""
    graphs = captured(model, kv, (1, 2, 4))
    name = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}.get(model.config.architecture, "gemma3_text")
    oracle = [(ids[:50], expected) for ids, expected in answers(tiny_checkpoint(name))]
    for step in range(50):
        alive = [i for i, (ids, _) in enumerate(oracle) if step < len(ids)]
        logits = graphs.forward(batch_of([([oracle[i][0][step]], step, [1 + i]) for i in alive], BLOCK))
        assert logits is not None
        for row, i in zip(logits, alive, strict=True):
            assert (row - oracle[i][1][step]).abs().max() <= 1e-4


def test_what_is_no_small_decode_runs_eagerly(model: Decoder, kv: list[LayerKV]) -> None:
    graphs = captured(model, kv, (1, 2))
    one = ([7], 3, [1])
    assert graphs.forward(batch_of([one, ([7], 3, [2])], BLOCK)) is not None
    assert graphs.forward(batch_of([one, ([7], 3, [2]), ([7], 3, [3])], BLOCK)) is None  # beyond the limit
    assert graphs.forward(batch_of([([7, 8], 3, [1])], BLOCK)) is None  # two tokens
    silent = batch_of([one, ([7], 3, [2])], BLOCK)
    silent.logit_rows = silent.logit_rows[:1]
    assert graphs.forward(silent) is None  # a prefill chunk of one token, which draws none
    graphs.close()
    assert graphs.forward(batch_of([one], BLOCK)) is None


def test_rows_that_left_leave_nothing_behind() -> None:
    inputs = StaticInputs(4, 3, torch.device("cpu"))
    inputs.fill(batch_of([([5], 300, [7, 8, 9]), ([6], 2, [3])], BLOCK), 4)
    inputs.fill(batch_of([([1], 0, [2])], BLOCK), 4)
    batch = inputs.batch(4, 1)
    assert batch.token_ids.tolist() == [1, 0, 0, 0] and batch.positions.tolist() == [0, 0, 0, 0]
    assert batch.slots.tolist() == [2 * BLOCK, 1, 2, 3]  # padding row i writes slot i, of block 0
    assert batch.block_tables.tolist() == [[2, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("limit", "more", "sizes"),
    [
        (16, {}, (1, 2, 4, 8, 16)),
        (40, {}, (1, 2, 4, 8, 16, 32, 40)),
        (48, {}, (1, 2, 4, 8, 16, 32, 48)),
        (3, {}, (1, 2, 3)),
        (1, {}, (1,)),
        (5, {"exact": True}, (1, 2, 3, 4, 5)),
        (256, {"rows": 20}, (1, 2, 4, 8, 16, 20)),
        (16, {"max_tokens": 6}, (1, 2, 4, 6)),
        (16, {"rows": 4, "exact": True}, (1, 2, 3, 4)),
        (0, {}, ()),
    ],
)
def test_sizes_that_are_captured(limit: int, more: dict[str, int], sizes: tuple[int, ...]) -> None:
    assert graph_sizes(limit, **{"rows": 128, **more}) == sizes


# --- pages under a graph ------------------------------------------------------------------------------------------


class Pages:
    """A model's cache of six blocks in arenas, a page a block and side; what is not mapped may not be touched."""

    def __init__(self) -> None:
        references = References(attention_dtypes=FLOATS)
        references.touch = require_mapped
        self.model = build(tiny_checkpoint("llama"), "float32", NpuOps(operators=references))
        widths = [tensor.bytes_per_block for tensor in self.model.cache_spec(BLOCK).tensors]
        driver = open_driver("cpu", page_bytes=widths[0], total_bytes=64 * widths[0])
        pool = PagePool(driver, page_bytes=widths[0])
        self.tensors = range(len(widths))
        self.store = VirtualKvStore(
            [Arena(driver, pool, 6 * width) for width in widths], pool, widths[0], fence=lambda: None
        )
        self.kv = self.model.kv_views(self.store.tensor, block_size=BLOCK, num_blocks=6)

    def map(self, *blocks: int) -> None:
        """Fresh pages hold NaN: old bytes of somebody else."""
        assert self.store.apply(PageDelta(map=self._pages(blocks)), 0).mapped
        for layer in self.kv:
            for block in blocks:
                layer.k[block], layer.v[block] = torch.nan, torch.nan

    def unmap(self, *blocks: int) -> None:
        assert self.store.apply(PageDelta(unmap=self._pages(blocks)), 0).stuck == ()

    def _pages(self, blocks: tuple[int, ...]) -> tuple[PageRef, ...]:
        return tuple(PageRef(tensor, block) for tensor in self.tensors for block in blocks)


def require_mapped(piece: torch.Tensor) -> None:
    """As the device would, but before the process dies of it."""
    if not is_accessible(piece.data_ptr()):
        raise RuntimeError(f"507015: {piece.data_ptr():#x} is not mapped")


def decode(graphs: DecodeGraphs, ids: list[int], position: int, block: int) -> int:
    logits = graphs.forward(batch_of([([ids[position]], position, [block])], BLOCK))
    assert logits is not None
    return int(logits[0].argmax())


def test_pages_come_and_go_between_replays() -> None:
    """A graph captured with block 0 alone follows a sequence to one page, loses it, and finds another."""
    pages = Pages()
    pages.map(0)
    graphs = DecodeGraphs(pages.model, pages.kv, options((1, 2)))
    graphs.capture()
    (ids, expected), found = answers(tiny_checkpoint("llama"))[0], []
    for block in (4, 2, 5):
        pages.map(block)
        found.append([decode(graphs, ids, position, block) for position in range(len(ids))])
        pages.unmap(block)
    assert found == [expected.argmax(-1).tolist()] * 3


@pytest.mark.parametrize("lost", [0, 3])
def test_an_address_that_is_no_longer_mapped_is_detected(lost: int) -> None:
    pages = Pages()
    pages.map(0, 3)
    graphs = DecodeGraphs(pages.model, pages.kv, options((2,)))
    graphs.capture()
    assert decode(graphs, [7], 0, 3) >= 0
    pages.unmap(lost)  # 3: the sequence's; 0: the padding row's
    with pytest.raises(RuntimeError, match="507015"):
        decode(graphs, [7], 0, 3)


# --- the emulated graphs themselves -------------------------------------------------------------------------------


def test_a_capture_freezes_what_is_on_the_host_and_refuses_to_wait() -> None:
    x, graphs = torch.ones(3), EmulatedGraphs()
    graph, factor = EmulatedGraph(), 2.0
    with graphs.graph(graph, auto_dispatch_capture=True):
        doubled = (x * factor).reshape(3, 1).contiguous()
    x.fill_(5.0)
    factor = 9.0
    graph.replay()
    assert doubled.flatten().tolist() == [10.0] * 3
    with pytest.raises(CaptureError, match="waits"), graphs.graph(graph):
        float(x.sum())
    with pytest.raises(RuntimeError, match="nothing was captured"):
        EmulatedGraph().replay()


def test_without_updates_attention_would_keep_old_lengths(
    model: Decoder, kv: list[LayerKV], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, second = captured(model, kv, (1,)), batch_of([([2], 1, [1])], BLOCK)
    graphs.forward(batch_of([([1], 0, [1])], BLOCK))
    fresh = graphs.forward(second).clone()
    graphs.forward(batch_of([([1], 0, [1])], BLOCK))
    with monkeypatch.context() as patched:
        patched.setattr(EmulatedGraph, "update", lambda self, cpu_update_input: None)
        assert (graphs.forward(second) - fresh).abs().max() > 1e-3
    assert torch.equal(graphs.forward(second), fresh)
