"""A model that leaves the others of its pool: what becomes of its requests, of what it shared, of what it counted."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
from checkpoints import tiny_checkpoint
from pool_models import KINDS, PAGE, Models, alone, answers, closing_clean, driver_of, hosted, open_llm, use_up_faults

from xllm_cli import LLM
from xllm_cli.core import (
    Done,
    Fork,
    Grammar,
    Output,
    Remove,
    Request,
    SamplingParams,
    Sleep,
    Snapshot,
    UpdateWeights,
    Wake,
)
from xllm_cli.engine import grammar
from xllm_cli.engine.commands import Commands
from xllm_cli.engine.slumber import Bed
from xllm_cli.engine.turns import Turns
from xllm_cli.errors import RequestError

LLAMA, QWEN = tiny_checkpoint("llama"), tiny_checkpoint("qwen3")
MOST_STEPS = 2000


@pytest.fixture
def models() -> Iterator[Models]:
    """The tiny llama, its twin, and another."""
    with closing_clean(open_llm("elastic")) as llm:
        models = Models(llm)
        models.fork("twin", LLAMA)
        models.fork("other", QWEN)
        yield models


def ask(llm: LLM, model: str, request_id: str = "open", max_tokens: int = 40) -> Output | None:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return llm.host.submit(Request(request_id=request_id, prompt_ids=[1, 2, 3], sampling=sampling, model=model))


class Loop:
    """Messages, steps and answers, as the engine's loop has them."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.commands = llm, Commands(llm.host)
        self.outputs: list[Output] = []
        self.done: dict[str, Done] = {}

    def step(self) -> None:
        events = self.llm.host.step()
        assert events.snapshot is not None
        self.outputs += events.outputs
        self.done |= {done.command_id: done for done in self.commands.answers(events.snapshot)}

    def until(self, *names: str) -> None:
        for _ in range(MOST_STEPS):
            if set(names) <= set(self.done):
                return
            self.step()
        raise AssertionError(f"{set(names) - set(self.done)} are not answered")


def refused(change: object) -> tuple[int, str]:
    with pytest.raises(RequestError) as caught:
        assert callable(change)
        change()
    return caught.value.status, caught.value.code


# --- what it held


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_held_is_held_by_nobody(kind: str) -> None:
    with closing_clean(open_llm(kind)) as llm:
        llm.host.trim()
        llm.idle()
        before, memory = driver_of(llm).usage(), llm.memory()
        models = Models(llm)
        models.fork("other", QWEN)
        for name in ("other", "llama"):
            assert answers(llm, name) == alone(models.of[name]).answers
        models.remove("other")
        llm.host.trim()
        llm.idle()
        models.check()
        after = driver_of(llm).usage()
        assert [after[name] for name in ("handles", "ranges")] == [before[name] for name in ("handles", "ranges")]
        now = llm.memory()
        told = ("physical", "weights", "possible", "models")
        assert {name: now[name] for name in told} == {name: memory[name] for name in told}
        assert now["budget"]["arena"] == memory["budget"]["arena"], "nobody else holds any of it"
        models.check_answers()


def test_its_objects_go_with_it(models: Models) -> None:
    assert answers(models.llm, "other") == alone(QWEN).answers
    other = hosted(models.llm)["other"]
    traces = [weakref.ref(each) for each in (other, other.engine, other.cache, other.loaded[0])]
    del other
    models.remove("other")
    gc.collect()
    assert [trace() for trace in traces] == [None] * len(traces)


@pytest.mark.parametrize("bed", [None, Bed(1), Bed(2), Bed(1, park=True)])
@pytest.mark.parametrize("leaves", ["twin", "other"])
def test_asleep_or_awake_it_leaves_and_comes_again(models: Models, bed: Bed | None, leaves: str) -> None:
    if bed is not None:
        models.llm.host.engine(leaves).sleep(bed)
    models.remove(leaves)
    models.check()
    models.fork(leaves, QWEN if leaves == "twin" else LLAMA)
    models.check_answers()


def test_weights_go_with_the_last_name_that_has_them(models: Models) -> None:
    models.fork("other too", QWEN)
    weights = models.llm.memory()["weights"]
    models.remove("other")
    assert models.llm.memory()["weights"] == weights and answers(models.llm, "other too") == alone(QWEN).answers
    models.llm.host.engine("other too").sleep(Bed(1, park=True))
    models.remove("other too")
    assert models.llm.memory()["weights"] < weights and models.llm.memory()["parked"] == 0
    models.check_answers()


def test_the_first_stays(models: Models) -> None:
    for name in ("", "llama"):
        assert refused(lambda name=name: models.llm.host.remove(name)) == (409, "first_model")
    assert refused(lambda: models.llm.host.remove("nobody")) == (404, "model_not_found")
    models.check_answers()


def test_a_page_that_stays_keeps_its_model(models: Models) -> None:
    """For as long as it stays: no page is nobody's."""
    driver, host = driver_of(models.llm), models.llm.host
    assert answers(models.llm, "other") == alone(QWEN).answers
    driver.reset_counts()
    for nth in range(1, 4):
        driver.fail("unmap", nth, False)
    with pytest.raises(
        RequestError, match=r"other is not removed: the device kept \d+ bytes of its KV cache"
    ) as caught:
        host.remove("other")
    assert (caught.value.status, caught.value.retry_after) == (503, 1)
    use_up_faults(driver, 3)
    assert answers(models.llm, "other") == alone(QWEN).answers
    assert host.remove("other") == ""
    del models.of["other"]
    models.check_answers()


def test_a_limit_goes_with_its_model(models: Models) -> None:
    models.llm.host.engine("other").set_own_limit(PAGE)
    models.remove("other")
    models.fork("other", QWEN)
    assert "limit" not in models.llm.memory()["models"]["other"]
    models.check_answers()


def test_totals_do_not_fall(models: Models) -> None:
    def totals(snapshot: Snapshot) -> list[int]:
        counters, memory = snapshot.counters, snapshot.memory
        return [counters.steps, counters.generation_tokens, memory.pages_unmapped_total, memory.preemptions_total]

    host = models.llm.host
    for name in ("twin", "other"):
        before = totals(host.snapshot())
        answers(models.llm, name)
        models.remove(name)
        assert all(now >= then for now, then in zip(totals(host.snapshot()), before, strict=True))
        assert host.snapshot().counters.generation_tokens > before[1]
    assert totals(models.llm.host.step().snapshot or host.snapshot())[1] == host.snapshot().counters.generation_tokens


def test_who_gave_way_to_it_goes_on(models: Models) -> None:
    models.remove("other")
    models.llm.host.engine("llama").gives_way = True
    models.remove("twin")
    assert answers(models.llm) == alone(LLAMA).answers


# --- its requests


def test_open_requests_keep_it_unless_they_may_end(models: Models) -> None:
    host = models.llm.host
    ask(models.llm, "other")
    host.step()
    assert refused(lambda: host.remove("other")) == (409, "model_busy")
    host.remove("other", "abort")
    (last,) = [output for output in host.step().outputs if output.request_id == "open"]
    assert last.finish == "error" and last.error is not None
    assert (last.error.status, last.error.code) == (404, "model_not_found")
    del models.of["other"]
    late = ask(models.llm, "other", "late")
    assert late is not None and late.error is not None and late.error.code == "model_not_found"


def test_the_only_one_left_tells_of_requests_that_ended_with_another() -> None:
    with closing_clean(open_llm("elastic")) as llm:
        llm.host.fork("other", str(QWEN))
        ask(llm, "other")
        llm.host.remove("other", "abort")
        assert llm.host.seconds_until_due() == 0
        assert [output.request_id for output in llm.host.step().outputs] == ["open"]
        assert llm.host.step().outputs == []


def test_it_waits_for_requests_and_takes_no_more(models: Models) -> None:
    loop = Loop(models.llm)
    ask(models.llm, "other")
    loop.step()
    loop.commands.take(Remove(command_id="go", model="other", mode="wait"))
    loop.step()
    assert not loop.done and models.llm.memory()["models"]["other"]["state"] == "awake"
    late = ask(models.llm, "other", "late")
    assert late is not None and late.error is not None and late.error.status == 404
    assert refused(lambda: models.llm.host.wake("other")) == (404, "model_not_found")
    assert refused(lambda: models.llm.host.fork("other", str(QWEN))) == (409, "model_changing")
    loop.until("go")
    assert (loop.done["go"].before, loop.done["go"].after, loop.done["go"].error) == ("awake", "absent", None)
    assert len([token for output in loop.outputs for token in output.token_ids]) == 40
    assert set(loop.done["go"].snapshot.memory.models) == {"llama", "twin"} and loop.done["go"].freed > 0
    del models.of["other"]
    models.check_answers()


@pytest.mark.parametrize("ends", ["abort", "cancel", "abort after cancel"])
def test_a_wait_can_be_cut_short(models: Models, ends: str) -> None:
    loop = Loop(models.llm)
    ask(models.llm, "other", max_tokens=100)
    loop.commands.take(Remove(command_id="wait", model="other", mode="wait"))
    loop.step()
    if "cancel" in ends:
        models.llm.host.abort("open")
    if "abort" in ends:
        loop.commands.take(Remove(command_id="abort", model="other", mode="abort"))
        loop.until("abort")
    loop.until("wait")
    assert not any(done.error for done in loop.done.values())
    assert [output.error is None for output in loop.outputs if output.finish] == ([False] if ends == "abort" else [])
    del models.of["other"]


def test_it_does_not_leave_while_it_wakes_for_who_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xllm_cli.vmm.weights.FILL_PAGES", 1)
    monkeypatch.setattr("xllm_cli.engine.host.IDLE_SLICE", 0.0)
    with closing_clean(open_llm("elastic", auto_wake=True)) as llm:
        llm.host.fork("other", str(QWEN), level=1)
        loop = Loop(llm)
        ask(llm, "other")
        loop.commands.take(Remove(command_id="go", model="other", mode="wait"))
        loop.step()
        loop.step()
        loaded = hosted(llm)["other"].loaded
        assert loaded is not None and loaded.weights.are_coming, "for the request that is waited for"
        del loaded
        llm.host.abort("open")
        llm.host._let_leave()
        assert "other" in hosted(llm) and llm.host.engine("other").is_waking
        loop.until("go")
        assert loop.done["go"].error is None and set(hosted(llm)) == {"llama"}


def test_falling_asleep_it_leaves_all_the_same(models: Models) -> None:
    loop = Loop(models.llm)
    ask(models.llm, "other")
    loop.commands.take(Sleep(command_id="sleep", model="other", mode="wait"))
    loop.step()
    loop.commands.take(Remove(command_id="go", model="other", mode="abort"))
    loop.until("sleep", "go")
    assert loop.done["go"].error is None and loop.done["sleep"].after == "absent"
    del models.of["other"]


@pytest.mark.parametrize("change", ["fork", "update", "wake"])
def test_it_does_not_leave_while_it_changes(models: Models, change: str) -> None:
    loop, name = Loop(models.llm), "new" if change == "fork" else "other"
    if change == "wake":
        models.llm.host.engine("other").sleep(Bed(2))
    commands = {
        "fork": Fork(command_id="change", model=name, model_path=str(tiny_checkpoint("qwen2"))),
        "update": UpdateWeights(command_id="change", model=name),
        "wake": Wake("change", name),
    }
    loop.commands.take(commands[change])
    loop.commands.take(Remove(command_id="early", model=name))
    loop.until("change", "early")
    error = loop.done["early"].error
    assert loop.done["change"].error is None and error is not None
    assert (error.status, error.code) == (409, "model_changing")
    loop.commands.take(Remove(command_id="late", model=name))
    loop.until("late")
    assert loop.done["late"].error is None
    models.of.pop(name, None)


def test_who_left_may_come_again_from_elsewhere(models: Models) -> None:
    loop = Loop(models.llm)
    loop.commands.take(Remove(command_id="go", model="other"))
    loop.commands.take(Fork(command_id="early", model="other", model_path=str(LLAMA)))
    loop.until("go", "early")
    loop.commands.take(Fork(command_id="late", model="other", model_path=str(LLAMA)))
    loop.until("late")
    assert loop.done["late"].error is None and loop.done["late"].ready is not None
    models.of["other"] = LLAMA
    models.check_answers()


def test_it_does_not_leave_while_another_is_made_of_its_weights(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are just coming back for the other."""
    monkeypatch.setattr("xllm_cli.vmm.weights.FILL_PAGES", 1)
    monkeypatch.setattr("xllm_cli.engine.host.IDLE_SLICE", 0.0)
    monkeypatch.setattr("xllm_cli.engine.host.BUSY_SLICE", 0.0)
    models.llm.host.engine("other").sleep(Bed(2))
    loop = Loop(models.llm)
    loop.commands.take(Fork(command_id="fork", model="copy", model_path=str(QWEN)))
    loop.step()
    assert not loop.done and hosted(models.llm)["other"].loaded is not None
    assert refused(lambda: models.llm.host.remove("other")) == (409, "model_changing")
    loop.until("fork")
    models.of["copy"] = QWEN
    models.remove("other")
    models.check_answers()


def test_who_waits_to_leave_lets_others_be_made_of_its_weights(models: Models) -> None:
    loop = Loop(models.llm)
    ask(models.llm, "other")
    loop.step()
    loop.commands.take(Remove(command_id="go", model="other", mode="wait"))
    loop.commands.take(Fork(command_id="fork", model="copy", model_path=str(QWEN)))
    loop.until("go", "fork")
    assert loop.done["go"].error is None and loop.done["fork"].error is None
    del models.of["other"]
    models.of["copy"] = QWEN
    models.check_answers()


def test_a_grammar_that_hangs_keeps_nobody(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    monkeypatch.setattr(grammar.Grammars, "_compile", lambda *_: hang.wait(60))
    sampling = SamplingParams(max_tokens=4, grammar=Grammar("regex", "a"))
    models.llm.host.submit(Request(request_id="guided", prompt_ids=[1], sampling=sampling, model="other"))
    models.llm.host.step()
    before = time.monotonic()
    models.llm.host.remove("other", "abort")
    assert time.monotonic() - before < grammar.CLOSE_SECONDS / 2
    hang.set()
    del models.of["other"]
    deadline = time.monotonic() + 20
    while any("grammar" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_turns_are_taken_without_who_is_gone() -> None:
    turns: Turns[str] = Turns()
    for who in ("a", "b"):
        turns.ran(turns.next(["a", "b"]), 1.0)
        turns.ran(who, 1.0)
    turns.forget("a")
    turns.forget("nobody")
    assert turns.next(["b"]) == "b"
    turns.ran("b", 5.0)
    assert turns.next(["a", "b"]) == "a", "who comes again under its name starts where the others are"
    turns.ran("a", 0.5)
    assert turns.next(["a", "b"]) == "a", "and has had nothing of what the one before had"
