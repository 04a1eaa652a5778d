"""A model that wakes while others go on: in slices, atomic, and everything else that may be asked of it meanwhile is
well defined."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_checkpoint
from pool_models import Models, alone, answers, closing_clean, driver_of, hosted, open_llm, pool_of
from pool_models import twisted as make_twisted
from test_models_pool import run_all, submit
from test_models_races import Race, check_tokens
from test_models_unusable import code_of, until_done

from xllm_cli import LLM
from xllm_cli.core import Done, Wake
from xllm_cli.engine.commands import Commands
from xllm_cli.engine.slices import CalledOff, Sliced
from xllm_cli.engine.slumber import LIGHT, Bed
from xllm_cli.vmm.weights import WeightArena
from xllm_cli.worker.backup import FileBackup

LLAMA, QWEN = tiny_checkpoint("llama"), tiny_checkpoint("qwen3")
BEDS = pytest.mark.parametrize("bed", [Bed(1), Bed(2)], ids=lambda bed: bed.state)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page at a time, and every slice as short as can be: tiny models take many, too."""
    monkeypatch.setattr("xllm_cli.vmm.weights.FILL_PAGES", 1)
    for name in ("BUSY_SLICE", "IDLE_SLICE"):
        monkeypatch.setattr(f"xllm_cli.engine.host.{name}", 0.0)


@pytest.fixture
def models() -> Iterator[Models]:
    with closing_clean(open_llm("elastic")) as llm:
        made = Models(llm)
        made.fork("other", QWEN)
        yield made
        until_done_waking(llm)
        made.check_answers()


def until_done_waking(llm: LLM) -> None:
    for _ in range(1000):
        if not llm.host._joining.is_busy:
            return
        llm.host.step()
    raise AssertionError("it wakes for ever")


def begin(llm: LLM, bed: Bed = LIGHT, model: str = "llama", slices: int = 2) -> Sliced[Any]:
    """A wake-up from this bed, so many slices of it done."""
    llm.host.engine(model).sleep(bed)
    begun = llm.host.begin_wake(model)
    for _ in range(slices):
        llm.host.step()
    assert not begun.is_done and llm.host.engine(model).model_state == bed.state
    return begun


@BEDS
def test_while_a_model_wakes_the_others_go_on(models: Models, bed: Bed) -> None:
    submit(models.llm, "long", "other", tokens=200)
    begun, tokens = begin(models.llm, bed), 0
    while not begun.is_done:
        tokens += sum(len(output.token_ids) for output in models.llm.host.step().outputs)
        models.llm.host.check()
    assert tokens > 1 and begun.result() is None
    assert models.llm.host.engine("llama").model_state == "awake"
    assert run_all(models.llm)["long"].finish == "length"


def test_what_needs_only_be_mapped_is_there_at_once(models: Models) -> None:
    host = models.llm.host
    submit(models.llm, "long", "other", tokens=20)
    host.engine("llama").sleep(Bed(1, park=True))
    assert host.begin_wake("llama").is_done and host.engine("llama").model_state == "awake"
    models.fork("twin", LLAMA)
    host.engine("twin").sleep(Bed(2))
    assert host.begin_wake("twin").is_done and host.engine("twin").model_state == "awake"


def test_alone_it_wakes_straight_through() -> None:
    with closing_clean(open_llm("elastic")) as llm:
        llm.engine.sleep(Bed(2))
        assert llm.host.begin_wake("").is_done and answers(llm) == alone(LLAMA).answers


@BEDS
def test_meanwhile_it_is_asleep_and_left_alone(models: Models, bed: Bed) -> None:
    host, engine = models.llm.host, models.llm.host.engine("llama")
    begun = begin(models.llm, bed)
    assert code_of(lambda: host.begin_wake("llama")) == code_of(lambda: host.wake("llama")) == (409, "model_waking")
    for other in (Bed(1), Bed(2), Bed(1, park=True)):
        assert code_of(lambda other=other: engine.sleep(other)) == (409, "model_waking")
    assert code_of(lambda: host.update("llama")) == (409, "model_sleeping")
    assert code_of(lambda: host.begin_remove("llama")) == (409, "model_changing")
    (answer,) = models.llm.generate([[1, 2]], model="llama")
    assert answer.error is not None and answer.error.code == "model_sleeping"
    assert "being woken" in answer.error.message
    until_done(models.llm, begun)


def test_a_pause_does_not_keep_it_from_waking(models: Models) -> None:
    begun = begin(models.llm)
    for mode in ("keep", "abort", "wait"):
        models.llm.host.engine("llama").pause(mode)  # type: ignore[arg-type]
    until_done(models.llm, begun)
    models.llm.host.engine("llama").resume()
    assert begun.result() is None


@BEDS
@pytest.mark.parametrize("slices", [0, 1, 3])
def test_called_off_it_leaves_nothing(models: Models, bed: Bed, slices: int) -> None:
    begun = begin(models.llm, bed, slices=slices)
    models.llm.host._joining.call_off()
    with pytest.raises(CalledOff):
        begun.result()
    models.llm.host.engine("llama").is_waking = False  # it may not even have begun
    models.check()
    assert hosted(models.llm)["llama"].weight_bytes == 0
    models.llm.host.wake("llama")


def test_an_end_in_the_middle_leaves_nothing() -> None:
    for bed in (Bed(1), Bed(2)):
        llm = open_llm("elastic")
        llm.host.fork("other", str(QWEN))
        begin(llm, bed)
        assert llm.close()
        usage = driver_of(llm).usage()
        assert (usage["handles"], usage["ranges"], usage["mapped"]) == (0, 0, 0), usage


@BEDS
@pytest.mark.parametrize("verb", ["create", "map"])
def test_a_device_that_refuses_undoes_all_of_it(models: Models, bed: Bed, verb: str) -> None:
    driver = driver_of(models.llm)
    for nth in range(1, 6):
        models.llm.host.engine("llama").sleep(bed)
        driver.reset_counts()
        driver.fail(verb, nth, nth % 2 == 0)
        begun = models.llm.host.begin_wake("llama")
        until_done(models.llm, begun)
        if models.llm.host.engine("llama").model_state != "awake":
            assert code_of(begun.result)[0] == 503
            models.check()
            models.llm.host.wake("llama")
        models.check()


def test_a_disk_that_fails_undoes_all_of_it(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = begin(models.llm)
    with monkeypatch.context() as patch:
        patch.setattr(WeightArena, "_bytes", lambda *_: (_ for _ in ()).throw(OSError("disk")))
        until_done(models.llm, begun)
    assert code_of(begun.result) == (503, "wake_failed")
    assert hosted(models.llm)["llama"].weight_bytes == 0
    models.llm.host.wake("llama")


# --- with others


def test_names_of_the_same_weights_wake_after_each_other_and_the_second_at_once(models: Models) -> None:
    host = models.llm.host
    models.fork("twin", LLAMA)
    host.engine("twin").sleep(Bed(2))
    first = begin(models.llm)
    second = host.begin_wake("twin")
    calls = driver_of(models.llm).counts()["create_pages"]
    until_done(models.llm, first)
    until_done(models.llm, second)
    pages = hosted(models.llm)["llama"].weight_bytes // pool_of(models.llm).page_bytes
    assert driver_of(models.llm).counts()["create_pages"] - calls <= pages
    assert [host.engine(name).model_state for name in ("llama", "twin")] == ["awake", "awake"]


def test_another_name_that_sleeps_deeper_meanwhile_takes_nothing_away(models: Models) -> None:
    models.fork("twin", LLAMA)
    models.llm.host.engine("twin").sleep(Bed(1))
    begun = begin(models.llm)
    models.llm.host.engine("twin").sleep(Bed(2))
    models.llm.host.check()
    until_done(models.llm, begun)
    assert [models.llm.host.engine(name).model_state for name in ("llama", "twin")] == ["awake", "deep"]


def test_a_twin_that_joins_meanwhile_waits_for_its_weights(models: Models) -> None:
    begun = begin(models.llm)
    fork = models.llm.host.begin_fork("twin", str(LLAMA))
    until_done(models.llm, fork)
    assert begun.is_done and fork.result().model_id == "twin"
    models.of["twin"] = LLAMA


def test_a_model_that_joins_meanwhile_takes_turns_with_it(models: Models, tmp_path: Path) -> None:
    models.of["new"] = make_twisted(tmp_path / "new")
    fork = models.llm.host.begin_fork("new", str(models.of["new"]))
    models.llm.host.step()
    begun = begin(models.llm)
    until_done(models.llm, begun)
    assert not fork.is_done, "it is longer, and nobody waits for all of it"
    until_done(models.llm, fork)


def test_one_that_is_woken_at_once_lets_another_name_of_its_weights_finish(models: Models) -> None:
    models.fork("twin", LLAMA)
    models.llm.host.engine("twin").sleep(Bed(1))
    begun = begin(models.llm)
    models.llm.host.wake("twin")
    assert begun.is_done and models.llm.host.engine("twin").model_state == "awake"


# --- for requests


@pytest.fixture
def willing() -> Iterator[Models]:
    """Two models that wake by themselves."""
    with closing_clean(open_llm("elastic", auto_wake=True)) as llm:
        made = Models(llm)
        made.fork("other", QWEN)
        yield made
        until_done_waking(llm)
        made.check_answers()


@BEDS
def test_a_request_wakes_its_model_while_others_go_on(willing: Models, bed: Bed) -> None:
    llm = willing.llm
    llm.host.engine("llama").sleep(bed)
    submit(llm, "long", "other", tokens=100)
    submit(llm, "waits", "llama")
    seen = [output.request_id for _ in range(3) for output in llm.host.step().outputs]
    assert "long" in seen and llm.host.engine("llama").is_waking
    ended = run_all(llm)
    assert {name: output.finish for name, output in ended.items()} == {"long": "length", "waits": "length"}


def test_requests_that_go_away_leave_it_awake_or_never_begun(willing: Models) -> None:
    host = willing.llm.host
    for name in ("llama", "other"):
        host.engine(name).sleep(Bed(1))
        submit(willing.llm, f"for {name}", name)
    for _ in range(3):
        host.step()
    assert [host.engine(name).is_waking for name in ("llama", "other")] == [True, True]
    for name in ("llama", "other"):  # the second has not begun: one wakes after the other
        host.abort(f"for {name}")
    until_done_waking(willing.llm)
    assert [host.engine(name).model_state for name in ("llama", "other")] == ["awake", "light"]


def test_a_removal_waits_until_a_wake_up_has_ended(willing: Models) -> None:
    host = willing.llm.host
    host.engine("other").sleep(Bed(1))
    submit(willing.llm, "waits", "other")
    departure = host.begin_remove("other", "wait")
    host.step()
    assert host.engine("other").is_waking
    host.abort("waits")
    until_done_waking(willing.llm)
    willing.llm.idle()
    assert departure.is_done and list(hosted(willing.llm)) == ["llama"]
    del willing.of["other"]


def test_an_order_is_answered_once_it_is_awake(models: Models) -> None:
    commands, done = Commands(models.llm.host), list[Done]()
    models.llm.host.engine("llama").sleep(Bed(1))
    for number in (1, 2):
        commands.take(Wake(f"{number}", "llama"))
    for _ in range(100):
        snapshot = models.llm.host.step().snapshot
        assert snapshot is not None
        done += commands.answers(snapshot)
        if not commands._open:
            break
    first = {each.command_id: each for each in done}
    assert first["2"].error is not None and first["2"].error.code == "model_waking"
    assert (first["1"].error, first["1"].before, first["1"].after) == (None, "light", "awake")
    assert first["1"].taken == hosted(models.llm)["llama"].weight_bytes


# --- memory


def test_what_stays_free_is_asked_again_with_every_slice(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, account = begin(models.llm), hosted(models.llm)["llama"].cache._account
    monkeypatch.setattr(account, "_limits", replace(account.limits, reserve=1 << 50))
    until_done(models.llm, begun)
    monkeypatch.undo()
    assert code_of(begun.result) == (503, "weights_memory_unavailable")
    assert hosted(models.llm)["llama"].weight_bytes == 0
    models.llm.host.wake("llama")


def test_without_room_for_all_of_it_nothing_is_begun(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    models.llm.host.engine("llama").sleep(Bed(1))
    driver_of(models.llm).reset_counts()
    monkeypatch.setattr(hosted(models.llm)["llama"].cache, "keep_free", lambda: 1 << 50)
    begun = models.llm.host.begin_wake("llama")
    until_done(models.llm, begun)
    monkeypatch.undo()
    assert code_of(begun.result) == (503, "weights_memory_unavailable")
    assert driver_of(models.llm).counts()["create_pages"] == 0
    models.llm.host.wake("llama")


def test_the_rest_of_what_wakes_is_nobody_elses(models: Models) -> None:
    begun, weights = begin(models.llm), hosted(models.llm)["llama"].loaded
    assert weights is not None and 0 < weights.weights.mapped_bytes < weights.weights.nbytes
    usage = hosted(models.llm)["other"].cache._account.usage
    assert usage.weights_elsewhere == weights.weights.nbytes
    del weights
    until_done(models.llm, begun)


def test_a_wake_up_that_failed_for_another_reason_asks_nobody_for_memory(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = models.llm.host.engine("llama")
    engine.sleep(Bed(1))
    with monkeypatch.context() as patch:
        patch.setattr(hosted(models.llm)["llama"].cache, "keep_free", lambda: 1 << 50)
        assert code_of(engine.wake) == (503, "weights_memory_unavailable")
    assert engine.needs.of_weights > 0

    def fail(*_: object) -> None:
        raise OSError("disk")

    with monkeypatch.context() as patch:
        patch.setattr(FileBackup, "fill", fail)
        assert code_of(engine.wake) == (503, "wake_failed")
    assert engine.needs.of_weights == 0
    engine.wake()


def test_one_that_fails_leaves_the_pages_where_the_others_want_them_by_then(models: Models) -> None:
    models.fork("twin", LLAMA)
    for name, bed in (("llama", Bed(2)), ("twin", LIGHT)):
        models.llm.host.engine(name).sleep(bed)
    begun = models.llm.host.begin_wake("llama")
    for _ in range(2):
        models.llm.host.step()
    models.llm.host.engine("twin").sleep(Bed(2))
    models.llm.host._joining.call_off()
    with pytest.raises(CalledOff):
        begun.result()
    weights = hosted(models.llm)["llama"].loaded
    assert weights is not None and weights.weights.weights.state == "deep"
    del weights
    models.check()


@pytest.mark.parametrize("flags", [{}, {"auto_sleep": True, "auto_wake": True}], ids=["", "by itself"])
@pytest.mark.parametrize("kind", ["elastic", "fixed"])
def test_every_request_ends_once_while_models_wake_in_slices(kind: str, flags: dict[str, Any], tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    with closing_clean(open_llm(kind, **flags)) as llm:
        race = Race(llm, random.Random(seed), make_twisted(tmp_path / "twisted"))
        race.go(80)
    check_tokens(race.answered())
