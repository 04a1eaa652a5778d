"""The library's face: a call that fails or is interrupted leaves nothing behind for the next one."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest
from checkpoints import tiny_checkpoint

from xllm_cli import LLM
from xllm_cli.core import Request, SamplingParams
from xllm_cli.errors import XllmError
from xllm_cli.vmm.pool import PagePool
from xllm_cli.worker.kv_store import VirtualKvStore
from xllm_cli.worker.worker import Worker

FLAGS = {"dtype": "float32", "block_size": 16, "enable_vmm_kvcache": True, "vmm_elastic": True}
PROMPTS = [[1, 2, 3], [4] * 20]


def greedy(count: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def make(**flags: object) -> LLM:
    return LLM(tiny_checkpoint("llama"), max_cache_size=16 << 20, **{**FLAGS, **flags})


@pytest.mark.parametrize("nth", range(1, 5))
@pytest.mark.parametrize("where", [(Worker, "_run"), (Worker, "execute"), (VirtualKvStore, "trim"), (PagePool, "take")])
def test_a_call_that_breaks_off_anywhere_leaves_nothing_behind(where: tuple, nth: int, monkeypatch: pytest.MonkeyPatch):
    owner, name = where
    calls = count(1)
    real = getattr(owner, name)

    def interrupted(self: object, *args: object, **wanted: object) -> object:
        if next(calls) == nth:
            raise KeyboardInterrupt
        return real(self, *args, **wanted)

    with make(phy_page_granularity_size=16384, host_page_mode="4k") as llm:
        right = [answer.token_ids for answer in llm.generate(PROMPTS, greedy(40))]
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            for first in range(100, 110):  # something new each time: nothing may be cached
                llm.generate([[first] * 10, *PROMPTS], greedy(40))
        assert not llm.engine.has_work
        llm.engine.check()
        assert [answer.token_ids for answer in llm.generate(PROMPTS, greedy(40))] == right
        memory = llm.memory()
        assert memory["physical"] == memory["mapped"] + memory["free_handles"]


def test_a_call_with_unequal_lists_queues_nothing():
    with make() as llm:
        with pytest.raises(ValueError, match="shorter"):
            llm.generate(PROMPTS, [greedy(5)])
        assert not llm.engine.has_work


def test_requests_of_the_engine_itself_go_on_beside_a_call():
    with make() as llm:
        llm.engine.submit(Request(request_id="own", prompt_ids=[5] * 9, sampling=greedy(30)))
        assert [len(answer.token_ids) for answer in llm.generate(PROMPTS, greedy(5))] == [5, 5]
        assert llm.engine.has_work


@pytest.mark.parametrize("count", [0, -1])
def test_less_than_one_token_is_refused(count: int):
    with make() as llm:
        error = llm.generate([[1]], greedy(count))[0].error
    assert (error.status, error.param) == (400, "max_tokens")


def test_closing_gives_all_descriptors_back():
    make().close()  # what is opened once and kept, torch's for one
    before = sorted(os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())
    llm = make()
    assert llm.close()
    del llm
    assert sorted(os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()) == before


def test_a_start_that_fails_leaves_nothing_open(tmp_path: Path):
    make().close()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for flags in ({"max_cache_size": 4096}, {"vmm_elastic": False, "max_cache_size": 4096}):
        with pytest.raises(XllmError):
            LLM(tiny_checkpoint("llama"), **{**FLAGS, **flags})
    assert len(list(Path("/proc/self/fd").iterdir())) == before
