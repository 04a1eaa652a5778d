"""The npu's operators and captured steps under the whole engine, on the host's memory: tests/npu/ has them on a device.

A cpu that is what an npu is: its rows are padded, its operators the vendor's by reference, its graphs emulated.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from npu.graphs import EmulatedGraph, EmulatedGraphs
from npu.operators import FLOATS, References
from pool_models import twisted

from xllm_cli import LLM
from xllm_cli.core import SamplingParams
from xllm_cli.errors import DeviceError, MemoryShortage, RequestError
from xllm_cli.models.ops.npu import NpuOps
from xllm_cli.worker.cpu_device import CpuDevice

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
MIB = 1 << 20
ELASTIC = {"enable_vmm_kvcache": True, "vmm_elastic": True, "host_page_mode": "4k", "phy_page_granularity_size": 16384}
PROMPTS = [[5, 6, 7], [9] * 20]
ATTENTION = "npu_fused_infer_attention_score"


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> References:
    made = References(attention_dtypes=FLOATS)
    monkeypatch.setattr(CpuDevice, "pads_rows", True)
    monkeypatch.setattr(CpuDevice, "open_ops", lambda self, memory=None, put=None: NpuOps(operators=made))
    monkeypatch.setattr(CpuDevice, "open_graphs", lambda self: EmulatedGraphs())
    return made


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many times what was captured for each number of rows ran again, in order."""
    seen, replay = [], EmulatedGraph.replay

    def counted(graph: EmulatedGraph) -> None:
        seen.append(rows_of(graph))
        replay(graph)

    monkeypatch.setattr(EmulatedGraph, "replay", counted)
    return seen


def rows_of(graph: EmulatedGraph) -> int:
    return next(call.args[0].shape[0] for call in graph.calls if call.function.overloadpacket.__name__ == ATTENTION)


def open_llm(name: str = "llama", **flags: Any) -> LLM:
    base = {"dtype": "float32", "block_size": 128, "max_cache_size": 4 * MIB, "enable_graph": True}
    return LLM(tiny_checkpoint(name), **{**base, **ELASTIC, **flags})


def oracle(name: str) -> tuple[list[list[int]], list[list[int]]]:
    found = json.loads((tiny_checkpoint(name) / "oracle.json").read_text())["answers"]
    return [a["prompt"] for a in found], [a["tokens"][:24] for a in found]


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("graphs", [True, False])
def test_tokens_with_and_without_graphs(references: References, replays: list[int], name: str, graphs: bool) -> None:
    prompts, expected = oracle(name)
    with open_llm(name, enable_graph=graphs, acl_graph_decode_batch_size_limit=4) as llm:
        assert [answer.token_ids for answer in llm.generate(prompts, GREEDY)] == expected
        assert llm.snapshot.counters.pages_mapped > 0
        llm.engine.check()
    assert replays.count(4) >= 20 if graphs else not replays


def test_beyond_the_limit_steps_run_eagerly(references: References, replays: list[int]) -> None:
    prompts, expected = oracle("llama")
    with open_llm(acl_graph_decode_batch_size_limit=2) as llm:
        answers = llm.generate([*prompts, prompts[0]], [GREEDY] * 3 + [SamplingParams(max_tokens=4, temperature=0.0)])
    assert [answer.token_ids for answer in answers[:3]] == expected
    assert replays == []  # three sequences or more, until all end together


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ({}, "1, 2, 4, 8, 16"),
        ({"acl_graph_decode_batch_size_limit": 3, "enable_graph_mode_decode_no_padding": True}, "1, 2, 3"),
        ({"max_tokens_for_graph_mode": 6}, "1, 2, 4, 6"),
        ({"max_seqs_per_batch": 2}, "1, 2"),
        ({"acl_graph_decode_batch_size_limit": 0}, None),
        ({"enable_graph": False}, None),
    ],
)
def test_flags_say_what_is_captured(
    references: References, caplog: pytest.LogCaptureFixture, flags: dict[str, Any], sizes: str | None
) -> None:
    with caplog.at_level(logging.INFO, "xllm.worker"), open_llm(**flags) as llm:
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=2))
    said = [record.getMessage() for record in caplog.records if "captured" in record.getMessage()]
    assert said == ([] if sizes is None else [f"captured decode steps of {sizes} sequences"])


def test_elastic_memory_adds_no_warm_up(references: References) -> None:
    """What runs before the server is ready is the same with a fixed pool: the warm-up and the captures."""
    runs = []
    for elastic in (True, False):
        references.calls.clear()
        with open_llm(vmm_elastic=elastic, max_memory_utilization=0.5, acl_graph_decode_batch_size_limit=2):
            runs.append(references.calls.count(ATTENTION))
    assert runs[0] == runs[1] > 0


def test_without_memory_for_graphs_the_start_says_what_to_lower(
    references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(npu_graph: EmulatedGraph, **options: Any) -> None:
        raise torch.OutOfMemoryError("NPU out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(EmulatedGraphs, "graph", staticmethod(refuse))
    with pytest.raises(MemoryShortage, match=r"of 1, 2 sequences.*2\.00 GiB.*--acl_graph_decode_batch_size_limit"):
        open_llm(acl_graph_decode_batch_size_limit=2)


def test_a_device_without_graphs_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with open_llm(block_size=16) as llm:
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=2))
    assert "--enable_graph=true changes nothing on cpu" in caplog.text


# --- other weights under the same graphs


@pytest.fixture
def in_pages(references: References, monkeypatch: pytest.MonkeyPatch) -> References:
    """As references, with the weights where the engine says."""
    monkeypatch.setattr(
        CpuDevice, "open_ops", lambda self, memory=None, put=None: NpuOps(operators=references, memory=memory, put=put)
    )
    return references


def refuse_from(nth: int, error: Callable[[], BaseException]) -> Callable[..., AbstractContextManager[None]]:
    """The nth capture fails, and all that follow."""
    original, numbers = EmulatedGraphs.graph, count(1)

    def graph(*args: Any, **options: Any) -> AbstractContextManager[None]:
        if next(numbers) >= nth:
            raise error()
        return original(*args, **options)

    return graph


FAILURES: dict[str, tuple[Callable[[], BaseException], type[BaseException]]] = {
    "shortage": (lambda: torch.OutOfMemoryError("NPU out of memory. Tried to allocate 2.00 GiB"), RequestError),
    "failure": (lambda: DeviceError("npu 0: the kernel driver refused"), RequestError),
    "interrupt": (KeyboardInterrupt, KeyboardInterrupt),
}


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("name", FAILURES)
def test_weights_whose_graphs_cannot_be_captured_are_not_exchanged(
    in_pages: References, replays: list[int], tmp_path: Path, name: str, nth: int
) -> None:
    error, kind = FAILURES[name]
    other = twisted(tmp_path / "other")
    with open_llm(acl_graph_decode_batch_size_limit=2, enable_vmm_weights=True) as llm:
        expected = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
        weights = llm.memory()["weights"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EmulatedGraphs, "graph", staticmethod(refuse_from(nth, error)))
            with pytest.raises(kind) as refused:
                llm.host.update("", str(other))
        assert not isinstance(refused.value, RequestError) or refused.value.status == 503
        del refused
        replays.clear()
        assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == expected and replays.count(2) > 20
        assert llm.memory()["weights"] == weights
        llm.host.update("", str(other))
        assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] != expected
        llm.host.update("", str(tiny_checkpoint("llama")))
        assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == expected
        llm.host.check()
        assert llm.close()
