"""Faults that users of models that sleep, wake and share a memory met, or might: each is done to real ones here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from checkpoints import tiny_checkpoint
from pool_models import GREEDY, KINDS, answers, closing_clean, open_llm
from test_weights_home import tensors

from xllm_cli import LLM
from xllm_cli.engine.slumber import Bed

QWEN3 = str(tiny_checkpoint("qwen3"))
ARCHITECTURES = ["gemma3_text", "llama", "llama_tied", "mistral", "qwen2", "qwen3"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_all_models_add_up(kind: str) -> None:
    with closing_clean(open_llm(kind)) as llm:
        llm.host.fork("second", QWEN3)
        for model in ("", "second", ""):
            llm.generate([[5] * 40], GREEDY, model=model)
            memory = llm.memory()
            assert memory["physical"] == memory["mapped"] + memory["free_handles"] + memory["parked"], memory
            assert memory["ranks"][0]["physical"] == memory["physical"]


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with closing_clean(open_llm("elastic", tiny_checkpoint(request.param))) as llm:
        yield llm


def test_every_architecture_lies_in_pages_whole_and_survives_every_level(architecture: LLM) -> None:
    expected = answers(architecture)
    group: Any = architecture.engine._group
    arena = group.weights.weights._arena
    found = [one.data_ptr() - arena._arena.address for one in tensors(group._worker._model, set())]
    assert len(found) > 10 and all(0 <= start < arena.used for start in found)
    for bed in (Bed(2), Bed(1), Bed(1, park=True), Bed(2)):
        architecture.engine.sleep(bed)
        architecture.engine.wake()
        assert answers(architecture) == expected, bed
