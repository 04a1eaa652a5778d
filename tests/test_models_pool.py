"""Several models in one pool: who gives memory to whom, and that nobody starves."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from checkpoints import tiny_checkpoint
from test_sleep import GREEDY, MIB, PROMPTS, answers, code_of, open_llm

from xllm_cli import LLM
from xllm_cli.core import Output, Request, SamplingParams
from xllm_cli.engine import parts
from xllm_cli.engine.slumber import Bed
from xllm_cli.vmm.driver import FaultyDriver, open_driver

PAGE = 64 << 10
SMALL = {"phy_page_granularity_size": 4096}
OTHER = "qwen3"


def fork(llm: LLM, name: str, checkpoint: str) -> None:
    llm.host.fork(name, str(tiny_checkpoint(checkpoint)))


def alone(checkpoint: str) -> list[list[int]]:
    """What a model answers that has a server of its own."""
    with LLM(tiny_checkpoint(checkpoint), dtype="float32", max_cache_size=16 * MIB, block_size=16) as plain:
        return answers(plain)


def answers_of(llm: LLM, model: str) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY, model=model)]


def state(llm: LLM, model: str) -> str:
    return llm.host.engine(model).model_state


@pytest.mark.parametrize("kind", ["elastic", "fixed", "weights alone"])
def test_a_fork_answers_like_a_server_of_its_own(kind: str) -> None:
    with open_llm(kind) as llm:
        fork(llm, "other", OTHER)
        fork(llm, "twin", "llama")
        assert answers_of(llm, "other") == alone(OTHER)
        assert answers_of(llm, "twin") == answers_of(llm, "") == alone("llama")
        llm.host.check()
        assert llm.close()


def test_the_same_weights_are_there_once() -> None:
    with open_llm("elastic", **SMALL) as llm:
        before = llm.memory()
        fork(llm, "twin", "llama")
        memory = llm.memory()
        assert memory["weights"] == before["weights"] == memory["models"]["twin"]["weights"]
        assert memory["mapped"] == memory["weights"] + sum(m["kv_mapped"] for m in memory["models"].values())
        llm.host.engine("twin").sleep(Bed(1))
        assert llm.memory()["weights"] == before["weights"], "the first still needs them"
        assert llm.memory()["models"]["twin"]["weights"] == 0
        llm.host.engine("").sleep(Bed(2))
        assert llm.memory()["weights"] == 0 == llm.memory()["physical"]
        llm.host.wake("twin")
        assert answers_of(llm, "twin") == alone("llama") and state(llm, "llama") == "deep"


def test_a_fork_of_what_is_there_changes_nothing(tmp_path: Path) -> None:
    with open_llm("elastic") as llm:
        fork(llm, "other", OTHER)
        before = llm.memory()["physical"]
        fork(llm, "other", OTHER)
        assert llm.memory()["physical"] == before
        assert code_of(lambda: fork(llm, "other", "llama")) == (409, "model_exists")
        assert code_of(lambda: llm.host.fork("none", str(tmp_path))) == (400, "model_invalid")


def test_one_models_idle_prefixes_make_room_for_anothers_request() -> None:
    with open_llm("elastic", max_cache_size=MIB // 2, **SMALL) as llm:
        fork(llm, "other", OTHER)
        prompt = [[number % 90 + 3 for number in range(300)]]
        llm.generate(prompt, GREEDY)
        before = llm.memory()["models"]["llama"]["kv_mapped"]
        assert before > MIB // 8
        (answer,) = llm.generate(prompt, GREEDY, model="other")
        assert answer.finish_reason == "length"
        facts = llm.memory()["models"]
        assert facts["llama"]["kv_mapped"] + facts["other"]["kv_mapped"] <= MIB // 2
        assert facts["llama"]["kv_mapped"] < before and facts["other"]["kv_mapped"] > MIB // 8


def test_a_loan_comes_at_once_though_what_stays_is_moved_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "SPARE_BYTES", 0)
    with open_llm("elastic", phy_page_granularity_size=PAGE) as llm:
        prompts = [[token] * 17 for token in range(3, 93)]  # a full block each, five to a page
        llm.generate(prompts, GREEDY)
        llm.generate(prompts[::3], GREEDY)
        engine = llm.host.engine("")
        assert all(engine.lend(PAGE) >= PAGE for _ in range(3))
        kept = llm.generate(prompts[::3], GREEDY)
        assert all(answer.cached_tokens == 16 for answer in kept)


def test_a_limit_holds_over_all_models_and_one_of_its_own_over_one() -> None:
    with open_llm("elastic", **SMALL) as llm:
        fork(llm, "other", OTHER)
        for model in ("", "other"):
            answers_of(llm, model)
        llm.host.set_limit(200_000)
        llm.idle()
        facts = llm.memory()["models"]
        assert 0 < facts["llama"]["kv_mapped"] + facts["other"]["kv_mapped"] <= 200_000
        llm.host.set_limit(None)
        answers_of(llm, "")
        llm.host.engine("other").set_own_limit(0)
        llm.host.touch("other")
        llm.idle()
        facts = llm.memory()["models"]
        assert facts["other"] | {"kv_mapped": 0, "limit": 0} == facts["other"] and facts["llama"]["kv_mapped"] > 0


def memory_for(models: float, **more: object) -> LLM:
    """The first model in a pool for the weights of about so many like it, and a little KV for each. A fixed one: how
    much of it there is depends on nothing else of this process."""
    with open_llm("elastic", **SMALL) as llm:
        weights = llm.memory()["weights"]
    cache = 300 << 10
    return open_llm("fixed", max_cache_size=int(models * (weights + cache)) - weights, **SMALL, **more)


def test_what_is_given_to_others_puts_nobody_to_sleep() -> None:
    with open_llm("elastic", auto_sleep=True, **SMALL) as llm:
        fork(llm, "other", OTHER)
        for model in ("", "other"):
            answers_of(llm, model)
        held = llm.memory()["kv_cached"]
        assert 0 < llm.host.trim(1 << 30) <= held + 64 * 4096
        assert [state(llm, model) for model in ("", "other")] == ["awake", "awake"]
        assert llm.memory()["kv_cached"] == 0


def copies(folder: Path, *names: str) -> list[str]:
    """Checkpoints as large as the first model's, each in a place of its own."""
    return [str(shutil.copytree(tiny_checkpoint("llama"), folder / name)) for name in names]


def test_the_least_recently_used_model_sleeps_for_another(tmp_path: Path) -> None:
    second, third = copies(tmp_path, "second", "third")
    with memory_for(2, auto_sleep=True, auto_wake=True) as llm:
        expected = answers_of(llm, "")
        llm.host.fork("second", second)
        assert answers_of(llm, "") == expected, "the first is used once more"
        llm.host.fork("third", third)
        assert [state(llm, model) for model in ("", "second", "third")] == ["awake", "light", "awake"]
        assert answers_of(llm, "second") == expected
        assert [state(llm, model) for model in ("", "second", "third")] == ["light", "awake", "awake"]
        assert answers_of(llm, "") == expected
        assert [state(llm, model) for model in ("", "second", "third")] == ["awake", "awake", "light"]
        llm.host.check()


def test_without_auto_sleep_a_fork_is_told_the_numbers_and_nothing_changes(tmp_path: Path) -> None:
    (second,) = copies(tmp_path, "second")
    with memory_for(1.3) as llm:
        expected, before = answers_of(llm, ""), llm.memory()["weights"]
        assert code_of(lambda: llm.host.fork("second", second)) == (503, "model_memory_unavailable")
        assert llm.memory()["weights"] == before and answers_of(llm, "") == expected
        llm.host.engine("").sleep(Bed(1))
        llm.host.fork("second", second)
        assert code_of(lambda: llm.host.wake("")) == (503, "weights_memory_unavailable")
        llm.host.engine("second").sleep(Bed(1))
        llm.host.wake("")
        assert answers_of(llm, "") == expected


def test_sleep_one_fork_another_into_its_pages_and_wake_the_first() -> None:
    with open_llm("fixed", max_cache_size=MIB, **SMALL) as llm:
        expected, pages = answers_of(llm, ""), llm.memory()["physical"]
        llm.host.engine("").sleep(Bed(1))
        fork(llm, "other", OTHER)
        assert answers_of(llm, "other") == alone(OTHER)
        llm.host.engine("other").sleep(Bed(1))
        llm.host.wake("")
        assert answers_of(llm, "") == expected and llm.memory()["physical"] == pages


def submit(llm: LLM, name: str, model: str, *, tokens: int = 8) -> None:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    refused = llm.host.submit(Request(request_id=name, prompt_ids=[3, 4, 5], sampling=sampling, model=model))
    assert refused is None


def run_all(llm: LLM, seconds: float = 30) -> dict[str, Output]:
    """The last output of every request."""
    ended = {}
    deadline = time.monotonic() + seconds
    while llm.host.has_work and time.monotonic() < deadline:
        ended.update({output.request_id: output for output in llm.host.step().outputs if output.finish})
        llm.host.rest()
    return ended


def test_five_models_answer_in_memory_for_two() -> None:
    names = {"": "llama", "b": "mistral", "c": "qwen2", "d": "qwen3", "e": "llama_tied"}
    with memory_for(2, auto_sleep=True, auto_wake=True) as llm:
        for name, checkpoint in list(names.items())[1:]:
            fork(llm, name, checkpoint)
        for number in range(20):
            submit(llm, f"{number}", list(names)[number % 5])
        ended = run_all(llm)
        assert len(ended) == 20 and all(output.finish == "length" for output in ended.values())
        for name, checkpoint in names.items():
            assert answers_of(llm, name) == alone(checkpoint)
        llm.host.check()
        assert llm.close()


def test_a_model_that_is_always_busy_gives_way_to_one_that_waits() -> None:
    with memory_for(1.5, auto_sleep=True, auto_wake=True) as llm:
        llm.host.engine("").sleep(Bed(1))
        fork(llm, "busy", "mistral")
        submit(llm, "waits", "")
        deadline, number, ended = time.monotonic() + 20, 0, set()
        while "waits" not in ended and time.monotonic() < deadline:
            if number - len(ended) < 4:  # somebody always runs and somebody always waits
                submit(llm, f"busy {number}", "busy")
                number += 1
            ended |= {output.request_id for output in llm.host.step().outputs if output.finish == "length"}
        assert "waits" in ended
        assert set(run_all(llm)) | ended == {"waits", *(f"busy {each}" for each in range(number))}


def test_while_a_model_joins_the_others_go_on() -> None:
    with open_llm("elastic", **SMALL) as llm:
        fork(llm, "other", OTHER)
        submit(llm, "long", "", tokens=200)
        slices = llm.host.begin_fork("third", str(tiny_checkpoint("mistral")))
        steps = 0
        while not slices.is_done:
            steps += sum(len(output.token_ids) for output in llm.host.step().outputs)
        assert steps > 0 and slices.result().model_id == "third"
        assert run_all(llm)["long"].finish == "length"
        assert answers_of(llm, "third") == alone("mistral")
        llm.host.check()


def test_a_host_that_ends_while_a_model_joins_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xllm_cli.engine.host.BUSY_SLICE", 0.0)
    driver = FaultyDriver(open_driver("cpu", page_bytes=4096))
    with open_llm("elastic", driver=driver, **SMALL) as llm:
        submit(llm, "long", "", tokens=200)
        slices = llm.host.begin_fork("other", str(tiny_checkpoint(OTHER)))
        while not llm.host._joining.asks:
            llm.host.step()
        for _ in range(3):
            llm.host.step()
        assert not slices.is_done
        assert llm.close() and driver.usage()["handles"] == 0


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_a_pause_lets_nothing_run_until_it_ends(mode: str) -> None:
    with open_llm("elastic") as llm:
        fork(llm, "other", OTHER)
        for name in ("", "other"):
            submit(llm, f"{name} one", name, tokens=20)
        for _ in range(6):
            llm.host.step()
        engine = llm.host.engine("other")
        engine.pause(mode)  # type: ignore[arg-type]
        submit(llm, "late", "other")
        outputs = [output for _ in range(60) for output in llm.host.step().outputs]
        assert not engine.is_running and llm.snapshot.models["other"].is_paused
        ended = {output.request_id: output.finish for output in outputs if output.finish}
        assert (
            ended
            == {" one": "length"} | {"keep": {}, "abort": {"other one": "error"}, "wait": {"other one": "length"}}[mode]
        )
        assert llm.host.seconds_until_due() != 0, "a pause is no reason to spin"
        engine.resume()
        assert {name: output.finish for name, output in run_all(llm).items()} == {"late": "length"} | (
            {"other one": "length"} if mode == "keep" else {}
        )


def test_new_weights_are_not_answered_for_with_what_the_old_ones_computed() -> None:
    with open_llm("elastic", **SMALL) as llm:
        fork(llm, "twin", "llama")
        expected = answers_of(llm, "twin")
        assert answers_of(llm, "twin") == expected and llm.snapshot.counters.prefix_cache_hits > 0
        before = llm.memory()["weights"]
        llm.host.update("twin")
        assert llm.memory()["weights"] == 2 * before, "the first keeps the pages they shared"
        hits = llm.snapshot.models["twin"].counters.prefix_cache_hits
        assert answers_of(llm, "twin") == expected
        assert llm.snapshot.models["twin"].counters.prefix_cache_hits == hits
        assert code_of(lambda: llm.host.update("twin", str(tiny_checkpoint(OTHER)))) == (400, "model_invalid")
        llm.host.engine("twin").sleep(Bed(1))
        assert code_of(lambda: llm.host.update("twin")) == (409, "model_sleeping")
