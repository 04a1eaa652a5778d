"""Models that join, leave, change, sleep and wake on a device that refuses each of its verbs at every step of it.

Whatever is refused: the command says so with a status, all models answer as before, nothing leaks, and trying again
works.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from checkpoints import tiny_checkpoint
from pool_models import (
    Models,
    alone,
    answers,
    closing_clean,
    driver_of,
    open_llm,
    pool_of,
    until_done,
    use_up_faults,
)
from pool_models import twisted as make_twisted

from xllm_cli.engine.slumber import Bed
from xllm_cli.errors import RequestError

VERBS = ("reserve", "create", "map", "unmap", "destroy", "release")
LLAMA, QWEN = "llama", "qwen3"
BEDS = {"light": Bed(1), "deep": Bed(2), "parked": Bed(1, park=True)}
SHORTAGE = pytest.mark.parametrize("shortage", [True, False], ids=["shortage", "failure"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def twisted(folder: Path) -> Path:
    return make_twisted(folder / "twisted")


class Change(NamedTuple):
    """Something done to the models, to the one of this name if it is about one; and what must come before it is done
    again."""

    do: Callable[[Models, str], None]
    undo: Callable[[Models], None] = lambda models: None


def sleep(models: Models, bed: Bed) -> None:
    wake(models)
    models.llm.host.engine(LLAMA).sleep(bed)


def wake(models: Models) -> None:
    if models.llm.host.engine(LLAMA).model_state != "awake":
        models.llm.host.wake(LLAMA)


def fork_twin(models: Models, name: str) -> None:
    models.fork(name, tiny_checkpoint(LLAMA))


def fork(folder: Path) -> Change:
    return Change(lambda models, name: models.fork(name, another(folder, name)))


def let_twins_sleep(models: Models) -> None:
    for name, path in models.of.items():
        if path == tiny_checkpoint(LLAMA) and models.llm.host.engine(name).model_state == "awake":
            models.llm.host.engine(name).sleep(Bed(1))


CHANGES = {
    "fork of a twin": Change(fork_twin),
    "fork of a twin that sleeps": Change(fork_twin, let_twins_sleep),
    **{f"sleep {name}": Change(lambda models, _, bed=bed: sleep(models, bed), wake) for name, bed in BEDS.items()},
    **{f"wake {name}": Change(lambda models, _: wake(models), lambda models, bed=bed: sleep(models, bed))
       for name, bed in BEDS.items()},
}  # fmt: skip


@SHORTAGE
@pytest.mark.parametrize("name", CHANGES)
def test_every_verb_may_be_refused_at_every_step(name: str, shortage: bool) -> None:
    with closing_clean(open_llm("elastic")) as llm:
        campaign(Models(llm), CHANGES[name], shortage=shortage)


@SHORTAGE
def test_a_fork_may_be_refused_at_every_step(tmp_path: Path, shortage: bool) -> None:
    with closing_clean(open_llm("elastic")) as llm:
        campaign(
            Models(llm), Change(lambda models, name: models.fork(name, another(tmp_path, name))), shortage=shortage
        )


@pytest.mark.parametrize("kind", ["fixed", "weights alone"])
def test_so_it_is_in_every_kind_of_memory(kind: str, tmp_path: Path) -> None:
    with closing_clean(open_llm(kind)) as llm:
        campaign(Models(llm), fork(tmp_path), shortage=True)


@SHORTAGE
@pytest.mark.parametrize("twin", [None, "awake", "light"])
def test_an_update_may_be_refused_at_every_step(twisted: Path, twin: str | None, shortage: bool) -> None:
    def exchange(models: Models, _: str) -> None:
        is_first = models.of[LLAMA] == tiny_checkpoint(LLAMA)
        models.update(LLAMA, twisted if is_first else tiny_checkpoint(LLAMA))

    def fork_again(models: Models) -> None:
        if twin is not None:
            name = f"twin-{len(models.of)}"
            models.fork(name, models.of[LLAMA])
            if twin == "light":
                models.llm.host.engine(name).sleep(Bed(1))

    with closing_clean(open_llm("elastic")) as llm:
        campaign(Models(llm), Change(exchange, fork_again), shortage=shortage)


@pytest.mark.parametrize("bed", [None, "deep", "parked"])
@pytest.mark.parametrize("twin", [None, "awake", "asleep"])
def test_a_removal_may_be_refused_at_every_step(twisted: Path, twin: str | None, bed: str | None) -> None:
    """Refused, it stays what it was, serves or sleeps on, and leaves when it is asked again."""

    def come(models: Models) -> None:
        if "leaves" not in models.of:
            models.fork("leaves", twisted)
            answers(models.llm, "leaves")
        engine = models.llm.host.engine("leaves")
        if bed is not None and engine.model_state != BEDS[bed].state:
            engine.sleep(BEDS[bed])

    with closing_clean(open_llm("elastic")) as llm:
        models = Models(llm)
        if twin is not None:
            models.fork("twin", twisted)
        if twin == "asleep":
            llm.host.engine("twin").sleep(Bed(1))
        campaign(models, Change(lambda models, _: models.remove("leaves"), come), shortage=False)


def another(folder: Path, name: str) -> Path:
    """The tiny qwen3 in a folder of its own: no twin of what was forked before."""
    made = folder / name
    if not made.exists():
        made.mkdir()
        for file in tiny_checkpoint(QWEN).iterdir():
            os.link(file, made / file.name)
    return made


def campaign(models: Models, change: Change, *, shortage: bool) -> None:
    """Refuse the first, second … of each verb that the change needs, and try again."""
    driver = driver_of(models.llm)
    models.fork("other", tiny_checkpoint("qwen2"))
    change.undo(models)
    driver.reset_counts()
    change.do(models, "clean")
    needed = {verb: driver.counts()[f"{verb}_pages"] for verb in VERBS}
    print("needed", needed)
    for verb, count in needed.items():
        for nth in range(1, count + 1):
            print(verb, nth)
            change.undo(models)
            check_later(models)
            driver.reset_counts()
            driver.fail(verb, nth, shortage)
            attempt(models, change, f"{verb}-{nth}")
            use_up_faults(driver, nth)
            check_later(models)
            assert answers(models.llm, "other") == alone(models.of["other"]).answers
    models.check_answers()


def attempt(models: Models, change: Change, name: str) -> None:
    """Do it; if it is refused, all is as before, and it is done again."""
    before = dict(models.of)
    try:
        change.do(models, name)
    except RequestError as error:
        print("refused", error.code, error.message)
        assert error.status == 503 and error.message, error
        assert models.of == before
        check_later(models)
        until_done(lambda: change.do(models, name))


def check_later(models: Models) -> None:
    """Once what the device kept has been tried again, nothing of it is left."""
    models.llm.idle()
    pool_of(models.llm).close_again()
    models.llm.idle()
    models.check()
