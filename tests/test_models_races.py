"""Requests to several models of one pool, raced with aborts, sleeps, wake-ups, pauses, forks and removals: every
request ends exactly once, none hangs, and what was answered is what the model answers alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from checkpoints import tiny_checkpoint
from pool_models import (
    KINDS,
    MIB,
    PAGE,
    TOTAL,
    Models,
    check,
    closing_clean,
    driver_of,
    hosted,
    open_llm,
    pool_of,
    use_up_faults,
)
from pool_models import twisted as make_twisted

from xllm_cli import LLM
from xllm_cli.core import (
    Command,
    Done,
    Fork,
    Output,
    Pause,
    Remove,
    Request,
    Resume,
    SamplingParams,
    SetLimit,
    Sleep,
    Trim,
    UpdateWeights,
    Wake,
)  # fmt: skip
from xllm_cli.engine.commands import Commands

ENDED_BY = {"model_sleeping", "paused", "model_not_found"}  # why a request may end without an answer
REFUSED = {"model_busy", "already_asleep", "already_awake", "falling_asleep", "model_waking", "model_sleeping",
           "model_exists", "model_invalid", "first_model", "model_changing", "model_not_found"}  # fmt: skip
FLOOR = 64 * MIB  # that growth leaves free on any host
SHORT = {"model_memory_unavailable", "weights_memory_unavailable"}
FAILED = {"sleep_failed", "wake_failed", "remove_failed"}
FAULTS = 6
TIGHT = {"max_cache_size": 3 * MIB, "auto_sleep": True, "auto_wake": True}
MOST_STEPS = 4000  # until all that was asked for has ended, once nothing new comes
LONGEST = 24
MESSAGES = 120


@pytest.fixture(scope="module")
def twisted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twisted(tmp_path_factory.mktemp("models") / "twisted")


@dataclass
class Asked:
    """A request and what came of it."""

    model: str
    path: Path | None
    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    ended: int = 0
    is_answered: bool = False
    is_aborted: bool = False


class Race:
    """A loop as the engine's, one random message at a time."""

    def __init__(self, llm: LLM, numbers: Random, twisted: Path, *, refused: set[str] = REFUSED) -> None:
        self.refused = refused
        self.llm, self.numbers = llm, numbers
        self.host = llm.host
        self.commands = Commands(llm.host)
        self.models = Models(llm)
        self.paths = [tiny_checkpoint("llama"), tiny_checkpoint("qwen3"), twisted]
        self.asked: dict[str, Asked] = {}
        self.open: dict[str, Command] = {}
        self.seen = Counter[str]()
        self.has_changed: set[str] = set()

    # --- messages

    def submit(self) -> None:
        name = self.numbers.choice([*self.models.of, "nobody"])
        prompt = [self.numbers.randrange(250)] * self.numbers.choice([1, 20, 70])
        request_id = f"request-{len(self.asked)}"
        max_tokens = self.numbers.randrange(1, LONGEST)
        self.asked[request_id] = Asked(name, self.models.of.get(name), prompt, max_tokens)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = Request(request_id=request_id, prompt_ids=prompt, sampling=sampling, model=name)
        refused = self.host.submit(request)
        if refused is not None:
            self.take(refused)

    def abort(self) -> None:
        running = [request_id for request_id, asked in self.asked.items() if not asked.ended]
        if running:
            request_id = self.numbers.choice(running)
            self.asked[request_id].is_aborted = True
            self.asked[request_id].ended = 1
            self.host.abort(request_id)

    def command(self) -> None:
        command_id, numbers = f"command-{self.seen.total() + len(self.open)}", self.numbers
        name = numbers.choice(list(self.models.of))
        mode, level = numbers.choice(["refuse", "wait", "abort"]), numbers.choice([1, 2])
        path, some = str(numbers.choice(self.paths)), numbers.choice([name, ""])
        made: Command = numbers.choice([
            Sleep(command_id=command_id, model=name, level=level, park=numbers.random() < 0.3, mode=mode),
            Wake(command_id, name), Wake(command_id, name), Wake(command_id, name),
            Pause(command_id=command_id, model=some, mode=numbers.choice(["keep", "abort", "wait"])),
            Resume(command_id, some), Resume(command_id, ""),
            Fork(command_id=command_id, model=f"model-{numbers.randrange(4)}", model_path=path, level=level // 2),
            Remove(command_id=command_id, model=name, mode=mode),
            UpdateWeights(command_id=command_id, model=min(self.models.of), model_path=path),
            SetLimit(command_id, numbers.choice([None, 2 * PAGE, 4 * PAGE]), some),
            Trim(command_id, numbers.choice([None, PAGE]), some),
        ])  # fmt: skip
        self.open[command_id] = made
        print(made)
        self.commands.take(made)

    # --- answers

    def step(self) -> None:
        events = self.host.step()
        assert events.snapshot is not None
        for output in events.outputs:
            self.take(output)
        for done in self.commands.answers(events.snapshot):
            self.finish(done)

    def take(self, output: Output) -> None:
        asked = self.asked[output.request_id]
        if asked.is_aborted:
            return  # it was ended as well, by a command, and the news came late
        assert not asked.ended, f"{output.request_id} goes on after its end"
        asked.tokens += output.token_ids
        if output.finish is not None:
            asked.ended += 1
            if output.error is not None:
                assert output.error.code in ENDED_BY, output.error
            else:
                asked.is_answered = True

    def finish(self, done: Done) -> None:
        command, memory = self.open.pop(done.command_id), done.snapshot.memory
        if isinstance(command, Sleep) and not self.may_differ and self.is_virtual:
            assert memory.physical == memory.mapped + memory.free_handles + memory.parked, memory
        self.seen[type(command).__name__ + (" refused" if done.error else "")] += 1
        if done.error is not None:
            assert done.error.code in self.refused, done.error
        elif isinstance(command, Fork) and command.model not in self.models.of:
            self.models.of[command.model] = Path(command.model_path)
        elif isinstance(command, Remove):
            assert done.after == "absent"
            self.models.of.pop(command.model, None)
        elif isinstance(command, UpdateWeights):
            self.models.of[command.model] = Path(command.model_path)
            self.has_changed.add(command.model)

    # --- all of it

    def go(self, messages: int, before_the_end: Callable[[], None] = lambda: None) -> None:
        verbs: list[Callable[[], None]] = [self.submit] * 4 + [self.abort] + [self.command] * 2
        for _ in range(messages):
            self.numbers.choice(verbs)()
            for _ in range(self.numbers.choice([0, 1, 1, 3])):
                self.step()
                check(self.llm) if not self.may_differ else self.host.check()
        before_the_end()
        self.end()

    @property
    def is_virtual(self) -> bool:
        return any(model.cache.page_bytes > 1 for model in hosted(self.llm).values())

    @property
    def may_differ(self) -> bool:
        """Pages may be somewhere that the models do not know: with a newcomer, or where the device kept them."""
        return self.refused >= FAILED or any(
            isinstance(command, Fork | UpdateWeights) for command in self.open.values()
        )

    def end(self) -> None:
        """Everybody may run: then everything ends."""
        self.host.set_limit(None)
        for name in self.models.of:
            self.host.engine(name).set_own_limit(None)
        for _ in range(MOST_STEPS):
            for name in self.models.of:
                self.host.engine(name).resume()
            if not self.open and not self.host.has_work:
                break
            self.step()
        assert not self.open and not self.host.has_work, f"{self.open} hang"
        for _ in range(3):
            self.step()
            pool_of(self.llm).close_again()
        assert all(asked.ended == 1 for asked in self.asked.values())
        self.models.check_answers()
        print(self.seen)

    def answered(self) -> dict[Path, list[Asked]]:
        """Requests that were answered by weights which stayed the same, by checkpoint."""
        found: dict[Path, list[Asked]] = {}
        for asked in self.asked.values():
            if asked.is_answered and asked.path is not None and asked.model not in self.has_changed:
                found.setdefault(asked.path, []).append(asked)
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_so_it_is_on_a_device_that_refuses_now_and_then(kind: str, twisted: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    numbers = Random(seed)
    with closing_clean(open_llm(kind)) as llm:
        driver = driver_of(llm)
        driver.reset_counts()
        for verb in ("create", "map", "unmap", "destroy", "reserve", "release", "info"):
            for nth in numbers.sample(range(1, 60), FAULTS):
                driver.fail(verb, nth, numbers.random() < 0.5)
        race = Race(llm, numbers, twisted, refused=REFUSED | SHORT | FAILED)
        race.go(MESSAGES, before_the_end=lambda: use_up_faults(driver, 60))
    check_tokens(race.answered())


@pytest.mark.parametrize("kind", ["elastic", "fixed"])
def test_so_it_is_where_not_all_models_fit(kind: str, twisted: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    total = (FLOOR + 5 * MIB) if kind == "elastic" else TOTAL
    with closing_clean(open_llm(kind, total=total, **TIGHT)) as llm:
        race = Race(llm, Random(seed), twisted, refused=REFUSED | SHORT)
        race.go(MESSAGES)
    check_tokens(race.answered())


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_ends_once_whatever_happens_to_its_model(kind: str, twisted: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    with closing_clean(open_llm(kind)) as llm:
        race = Race(llm, Random(seed), twisted)
        race.go(MESSAGES)
    check_tokens(race.answered())


def check_tokens(answered: dict[Path, list[Asked]]) -> None:
    """Of each request, they are the first of what its model answers alone."""
    longest = SamplingParams(max_tokens=LONGEST, temperature=0.0, ignore_eos=True)
    for path, requests in answered.items():
        with open_llm("elastic", path) as llm:
            expected = llm.generate([asked.prompt for asked in requests], longest)
        for asked, reference in zip(requests, expected, strict=True):
            assert asked.tokens == reference.token_ids[: asked.max_tokens], asked
