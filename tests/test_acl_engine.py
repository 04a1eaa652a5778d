"""A whole engine over emulated Ascend memory: the tokens of the host's, whatever call of the vendor fails."""

from __future__ import annotations

from itertools import product

import pytest
from acl_emulation import DRIVER_FAILED, OUT_OF_MEMORY, clean_emulator, held
from checkpoints import tiny_checkpoint
from driver_kinds import open_kind

from xllm_cli import LLM
from xllm_cli.core import SamplingParams
from xllm_cli.engine import parts

FUNCTIONS = ("aclrtMallocPhysical", "aclrtFreePhysical", "aclrtMapMem", "aclrtUnmapMem")
FLAGS = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4096,
    "enable_vmm_kvcache": True,
    "vmm_elastic": True,
    "enable_prefix_cache": False,
}


def answers(llm: LLM) -> list[list[int]]:
    """Greedy tokens of waves of requests; between them all pages go back."""
    wanted, tokens = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), []
    for wave in range(3):
        prompts = [[(31 * wave + 7 * i + j) % 250 for j in range(5 + i)] for i in range(3)]
        done = llm.generate(prompts, wanted)
        tokens += [one.token_ids if one.error is None else [one.error.status] for one in done]
        for _ in range(3):
            llm.idle()
        llm.engine.check()
    return tokens


def open_engine(kind: str) -> LLM:
    driver = open_kind(kind, pages=1 << 20)
    return LLM(tiny_checkpoint("llama"), driver=driver, max_cache_size=64 << 20, **FLAGS)


def test_an_engine_treats_a_failing_vendor_as_it_treats_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "SPARE_BYTES", 0)  # every wave gives its pages back and creates them again
    with open_engine("host-4k") as llm:
        right = answers(llm)
    with clean_emulator() as emulator, open_engine("acl") as llm:
        assert answers(llm) == right
        emulator.reset()
        assert answers(llm) == right
        calls = {function: emulator.calls(function) for function in FUNCTIONS}
        assert min(calls.values()) >= 2
        for function, code in product(FUNCTIONS, (OUT_OF_MEMORY, DRIVER_FAILED)):
            emulator.reset()
            emulator.inject(function, code, nth=calls[function])
            assert answers(llm) == right, f"{function} {code}"
            assert emulator.counters()[function].injected == 1
        assert held(emulator) == (0, 0), "between waves nothing is created"
