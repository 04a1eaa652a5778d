"""Who gives way to whom in one pool: nobody for what could not come of it, and names of the same weights together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_models_pool import OTHER, SMALL, answers_of, copies, fork, memory_for, run_all, state, submit
from test_sleep import GREEDY, MIB, open_llm

from xllm_cli import LLM
from xllm_cli.core import Request, SamplingParams
from xllm_cli.engine.slumber import LIGHT


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims come at once."""
    for name in ("CLAIM_SECONDS", "AWAKE_SECONDS"):
        monkeypatch.setattr(f"xllm_cli.engine.room.{name}", 0.0)


def submit_long(llm: LLM, name: str, model: str, *, prompt: int, tokens: int) -> None:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    prompt_ids = [number % 90 + 3 for number in range(prompt)]
    assert llm.host.submit(Request(request_id=name, prompt_ids=prompt_ids, sampling=sampling, model=model)) is None


def rounds(llm: LLM, count: int, *busy: str) -> Iterator[set[str]]:
    """The ids that ended with each of so many rounds, in which every `busy` model always has something to do."""
    number = 0
    for _ in range(count):
        for model in busy:
            if llm.host.engine(model).num_open < 2:
                submit(llm, f"{model} {number}", model)
                number += 1
        yield {output.request_id for output in llm.host.step().outputs if output.finish}


def test_without_auto_sleep_nobody_waits_for_weights_that_nobody_gives(tmp_path: Path) -> None:
    (busy,) = copies(tmp_path, "busy")
    with memory_for(1.3, auto_wake=True) as llm:
        llm.host.engine("").sleep(LIGHT)
        llm.host.fork("busy", busy)
        submit(llm, "waits", "")
        lacked = 0
        for _ in rounds(llm, 60, "busy"):
            lacked = max(lacked, llm.host.engine("").needs.of_pool)
            assert not llm.host.engine("busy").gives_way
        assert lacked > 0 and state(llm, "llama") == "light"
        llm.host.abort("waits")
        run_all(llm)


def test_a_busy_model_gives_way_for_kv_that_it_can_give() -> None:
    with open_llm("elastic", max_cache_size=MIB // 2, enable_prefix_cache=False, **SMALL) as llm:
        fork(llm, "other", OTHER)
        submit_long(llm, "long", "other", prompt=250, tokens=40)
        for _ in range(3):
            llm.host.step()
        submit_long(llm, "waits", "", prompt=250, tokens=4)
        gave_way = False
        ended: set[str] = set()
        for ids in rounds(llm, 400, "other"):
            gave_way |= llm.host.engine("other").gives_way
            ended |= ids
            if "waits" in ended:
                break
        assert gave_way and "waits" in ended
        run_all(llm)


def test_names_of_the_same_weights_sleep_together(tmp_path: Path) -> None:
    (second,) = copies(tmp_path, "second")
    with memory_for(1.3, auto_sleep=True, auto_wake=True) as llm:
        expected = answers_of(llm, "")
        fork(llm, "twin", "llama")
        llm.host.fork("second", second)
        assert [state(llm, model) for model in ("", "twin", "second")] == ["light", "light", "awake"]
        submit(llm, "runs", "twin", tokens=100)
        assert answers_of(llm, "twin") == answers_of(llm, "second") == expected
        assert run_all(llm).keys() <= {"runs"}
        llm.host.check()


def test_one_of_them_that_has_something_to_do_keeps_all_awake(tmp_path: Path) -> None:
    (second,) = copies(tmp_path, "second")
    with memory_for(1.3, auto_sleep=True) as llm:
        fork(llm, "twin", "llama")
        submit(llm, "runs", "twin", tokens=100)
        assert llm.host.begin_fork("second", second) is not None
        while llm.host._joining.is_busy:
            llm.host.step()
        assert [state(llm, model) for model in ("", "twin")] == ["awake", "awake"]
        assert list(llm.snapshot.models) == ["llama", "twin"]
        assert run_all(llm)["runs"].finish == "length"


def test_busy_names_of_the_same_weights_give_way_together(tmp_path: Path) -> None:
    (second,) = copies(tmp_path, "second")
    with memory_for(1.3, auto_sleep=True, auto_wake=True) as llm:
        fork(llm, "twin", "llama")
        llm.host.fork("second", second)
        assert llm.generate([[1, 2]], GREEDY)[0].finish_reason == "length"
        assert state(llm, "second") == "light"
        submit(llm, "waits", "second")
        deadline = time.monotonic() + 30
        for ended in rounds(llm, 1 << 30, "llama", "twin"):
            if "waits" in ended or time.monotonic() > deadline:
                break
        assert "waits" in ended
        run_all(llm)
        llm.host.check()
