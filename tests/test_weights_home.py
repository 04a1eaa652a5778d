"""With weights in pages nothing of a model lies elsewhere: every tensor that the model object holds is looked at."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from test_sleep import open_llm

from xllm_cli import LLM


def tensors(node: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor that can be reached from `node`, through any of our objects and containers."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, torch.Tensor):
        yield node
        return
    children: list[Any] = []
    if isinstance(node, dict):
        children = list(node.values())
    elif isinstance(node, (list, tuple, set)):
        children = list(node)
    elif type(node).__module__.startswith("xllm_cli.models") or isinstance(node, torch.nn.Module):
        slots = [name for kind in type(node).__mro__ for name in getattr(kind, "__slots__", ())]
        children = [*vars(node).values()] if hasattr(node, "__dict__") else []
        children += [getattr(node, name) for name in slots if hasattr(node, name)]
    for child in children:
        yield from tensors(child, seen)


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_llm("elastic", model=request.param) as made:
        yield made


def test_every_parameter_and_table_lies_in_the_arena(llm: LLM) -> None:
    group = llm.engine._group
    weights, found = group.weights.weights, list(tensors(group._worker._model, set()))
    start, used = weights._arena._arena.address, weights._arena.used
    outside = [(tuple(one.shape), one.dtype) for one in found if not start <= one.data_ptr() < start + used]
    assert len(found) > 10 and outside == []
    held = {one.data_ptr(): one.untyped_storage().nbytes() for one in found}
    assert sum(held.values()) <= used <= sum(held.values()) + 64 * len(held), "nothing but them, and their alignment"


def test_at_most_a_page_is_wasted(llm: LLM) -> None:
    weights, memory = llm.engine._group.weights.weights, llm.memory()
    assert 0 <= memory["weights"] - weights._arena.used < memory["page_bytes"]


@pytest.mark.parametrize("flags", [{}, {"enable_manual_loader": True}, {"enable_vmm_weights": True}])
def test_the_log_says_that_a_cpu_stages_nothing(flags: dict[str, bool], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with LLM(tiny_checkpoint("llama"), device="cpu", vmm_elastic=True, max_cache_size=16 << 20, **flags):
        said = [record.message for record in caplog.records if "weights read in" in record.message]
    assert len(said) == 1 and said[0].endswith("bytes, packed straight into place: the device's memory is the host's")
