"""Faults that users of systems with several models in one memory met, or might: each is done to a real one here."""

from __future__ import annotations

import pytest
from checkpoints import tiny_checkpoint
from pool_models import KINDS, closing_clean, open_llm

QWEN3 = str(tiny_checkpoint("qwen3"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_all_models_add_up(kind: str) -> None:
    with closing_clean(open_llm(kind)) as llm:
        llm.host.fork("second", QWEN3)
        for model in ("", "second", ""):
            llm.generate([[5] * 40], model=model)
            memory = llm.memory()
            assert memory["physical"] == memory["mapped"] + memory["free_handles"] + memory["parked"], memory
            assert memory["ranks"][0]["physical"] == memory["physical"]
