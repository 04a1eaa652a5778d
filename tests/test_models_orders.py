"""Whatever order models of one pool fork, leave, sleep, park, wake, change and answer in: each answers as if it were
alone, its weights are the checkpoint's to the byte, and every page is counted."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from pathlib import Path
from random import Random

import pytest
from checkpoints import tiny_checkpoint
from pool_models import KINDS, MIB, PAGE, Models, alone, answers, closing_clean, driver_of, hosted, open_llm
from pool_models import twisted as make_twisted

from xllm_cli import LLM
from xllm_cli.engine.slumber import Bed
from xllm_cli.errors import RequestError

BEDS = [Bed(1), Bed(2), Bed(1, park=True)]
NAMES = 5
ORDERS, STEPS = 3, 14
SLACK = 24 * MIB  # a hundredth of what a hundred leaked copies of the weights would be, and noise
NOISE = (0, 0, 30, 1 << 15)  # threads, files, mappings, pages: heaps of the C library and of Python come and stay


@pytest.fixture(scope="module")
def twisted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twisted(tmp_path_factory.mktemp("models") / "twisted")


class Order:
    """One thing after another done to the models of an LLM, each drawn at random; refusals are part of it."""

    def __init__(self, models: Models, numbers: Random, twisted: Path) -> None:
        self.models = models
        self.host = models.llm.host
        self.numbers = numbers
        self.paths = [tiny_checkpoint("llama"), tiny_checkpoint("qwen3"), twisted]
        self.paused: set[str] = set()

    def go(self, steps: int) -> None:
        verbs = [self.fork, self.fork, self.remove, self.sleep, self.sleep, self.wake, self.update, self.answer]
        verbs += [self.answer, self.pause, self.limit, self.trim, self.idle]
        for _ in range(steps):
            verb = self.numbers.choice(verbs)
            name = self.numbers.choice(list(self.models.of))
            print(verb.__name__, name)
            verb(name)
            self.models.check()
        self.resume()
        self.host.set_limit(None)
        self.models.check_answers()

    def fork(self, _: str) -> None:
        if len(self.models.of) < NAMES:
            name = next(name for number in range(NAMES) if (name := f"model-{number}") not in self.models.of)
            level = self.numbers.choice([0, 0, 1, 2])
            self.models.fork(name, self.numbers.choice(self.paths), level)
            assert self.host.engine(name).model_state == ["awake", "light", "deep"][level]

    def remove(self, name: str) -> None:
        if name == "llama":
            with pytest.raises(RequestError, match="the model that the server started with") as caught:
                self.models.remove(name)
            assert (caught.value.status, caught.value.code) == (409, "first_model")
        else:
            self.models.remove(name)
            self.paused.discard(name)

    def sleep(self, name: str) -> None:
        bed, engine = self.numbers.choice(BEDS), self.host.engine(name)
        before = engine.model_state
        try:
            engine.sleep(bed)
        except RequestError as error:
            assert error.code == "already_asleep" and engine.model_state == before
        else:
            assert engine.model_state == bed.state

    def wake(self, name: str) -> None:
        before = self.host.engine(name).model_state
        try:
            self.host.wake(name)
        except RequestError as error:
            assert (error.code, before) == ("already_awake", "awake")
        assert self.host.engine(name).model_state == "awake"

    def update(self, name: str) -> None:
        state, form = self.host.engine(name).model_state, hosted(self.models.llm)[name].form
        path = self.numbers.choice(self.paths)
        try:
            self.models.update(name, path)
        except RequestError as error:
            assert (error.status, state == "awake") in ((409, False), (400, True)), error
        else:
            assert state == "awake" and hosted(self.models.llm)[name].form == form

    def answer(self, name: str) -> None:
        if self.host.engine(name).model_state == "awake" and name not in self.paused:
            assert answers(self.models.llm, name) == alone(self.models.of[name]).answers

    def pause(self, name: str) -> None:
        if name in self.paused:
            self.host.engine(name).resume()
            self.paused.remove(name)
        else:
            self.host.engine(name).pause(self.numbers.choice(["keep", "abort", "wait"]))
            self.paused.add(name)

    def resume(self) -> None:
        for name in self.paused:
            self.host.engine(name).resume()

    def limit(self, name: str) -> None:
        nbytes = self.numbers.choice([None, 2 * PAGE, 8 * PAGE])
        if self.numbers.random() < 0.5:
            self.host.set_limit(nbytes)
        else:
            self.host.engine(name).set_own_limit(nbytes)

    def trim(self, _: str) -> None:
        self.host.trim(self.numbers.choice([None, PAGE, MIB]))

    def idle(self, _: str) -> None:
        self.models.llm.idle()


@pytest.mark.parametrize("kind", KINDS)
def test_any_order_leaves_all_as_they_would_be_alone(kind: str, twisted: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    for number in range(ORDERS):
        with closing_clean(open_llm(kind, enable_prefix_cache=True)) as llm:
            Order(Models(llm), Random(seed + number), twisted).go(STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_orders_leave_all_as_they_would_be_alone(kind: str, twisted: Path) -> None:
    seed = random.randrange(1 << 32)
    for number in range(12):
        print("seed", seed + number)
        with closing_clean(open_llm(kind)) as llm:
            Order(Models(llm), Random(seed + number), twisted).go(60)


def test_a_limit_on_all_holds_for_who_joins_later() -> None:
    with closing_clean(open_llm("elastic")) as llm:
        llm.host.set_limit(2 * PAGE)
        llm.host.fork("other", str(tiny_checkpoint("qwen3")))
        assert hosted(llm)["other"].cache.limits.limit == 2 * PAGE
        assert answers(llm, "other") == alone(tiny_checkpoint("qwen3")).answers
        assert answers(llm) == alone(tiny_checkpoint("llama")).answers
        assert sum(model.kv_in_pool for model in hosted(llm).values()) <= 2 * PAGE


def test_a_hundred_cycles_leak_nothing(twisted: Path) -> None:
    """Of the process either: what only it holds is what it was, but for what the C library keeps."""
    with closing_clean(open_llm("elastic")) as llm:
        models = Models(llm)
        models.fork("twin", tiny_checkpoint("llama"))
        models.fork("other", tiny_checkpoint("qwen3"))
        cycle(models, twisted)
        before, uss = driver_of(llm).usage(), private_bytes()
        for _ in range(100 // len(BEDS)):
            cycle(models, twisted)
        after = driver_of(llm).usage()
        assert [after[kind] for kind in ("handles", "ranges", "mapped")] == [
            before[kind] for kind in ("handles", "ranges", "mapped")
        ]
        assert private_bytes() - uss < SLACK
        models.check_answers()


def test_a_hundred_who_came_and_left_leave_nothing(twisted: Path) -> None:
    """Nor do their threads, files and addresses stay."""
    with closing_clean(open_llm("elastic")) as llm:
        models = Models(llm)
        models.fork("stays", tiny_checkpoint("qwen3"))
        come_and_go(models, twisted)
        held, traces, uss = held_by(llm), traces_of_process(), private_bytes()
        for _ in range(100 // (2 * len(BEDS)) + 1):
            come_and_go(models, twisted)
        assert held_by(llm) == held
        assert private_bytes() - uss < SLACK
        assert all(now <= before + more for now, before, more in zip(traces_of_process(), traces, NOISE, strict=True))
        models.check_answers()


def come_and_go(models: Models, twisted: Path) -> None:
    """A twin and one of other weights, both to leave out of each bed, and awake."""
    for bed in [None, *BEDS[1:]]:
        for name, path in (("twin", tiny_checkpoint("llama")), ("changed", twisted)):
            models.fork(name, path)
            answers(models.llm, name)
            if bed is not None:
                models.llm.host.engine(name).sleep(bed)
        for name in ("changed", "twin"):
            models.remove(name)
    models.llm.idle()
    models.llm.host.trim()
    models.llm.idle()


def held_by(llm: LLM) -> dict[str, int]:
    return {kind: number for kind, number in driver_of(llm).usage().items() if kind in ("handles", "ranges", "mapped")}


def traces_of_process() -> tuple[int, int, int, int]:
    """Threads, files, mappings and pages of addresses, once what ends by itself has ended."""
    deadline = time.monotonic() + 10
    while any(thread.name == "backup" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    gc.collect()
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    addresses = int(Path("/proc/self/statm").read_text().split()[0])
    return threading.active_count(), len(os.listdir("/proc/self/fd")), mappings, addresses


def cycle(models: Models, twisted: Path) -> None:
    """Every bed once for every model, and other weights for one of them."""
    host = models.llm.host
    for bed in BEDS:
        for name in models.of:
            host.engine(name).sleep(bed)
        for name in models.of:
            host.wake(name)
    models.update("twin", twisted if models.of["twin"] != twisted else tiny_checkpoint("llama"))
    models.llm.idle()
    host.trim()
    models.llm.idle()


def private_bytes() -> int:
    """Memory that this process alone has."""
    gc.collect()
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Private_"))
