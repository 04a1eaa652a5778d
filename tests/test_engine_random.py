"""Random traffic: the scheduler over a real cache with ranks that refuse, the engine over a driver that fails.

Two oracles: what every slot of the cache holds (no row may read KV of other tokens), and the tokens of an engine that
was never short.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
from cache_ops import Clock, FakeRanks, make_cache, spec_of
from checkpoints import tiny_checkpoint
from covering import steps_until

from xllm_cli import LLM
from xllm_cli.core import Output, Request, Row, SamplingParams, StepPlan, StepResult, TokenLogprob
from xllm_cli.engine import parts
from xllm_cli.engine.scheduler import Scheduler, StepLimits
from xllm_cli.engine.sequence import Sequence
from xllm_cli.models.ops.cpu import CpuOps
from xllm_cli.vmm.driver import FaultyDriver, open_driver

SEEDS = random.SystemRandom()
GREEDY = {"temperature": 0.0, "ignore_eos": True}

# --- the scheduler


class Ranks(FakeRanks):
    """Pages that may be refused, and what each slot holds: a digest of the tokens up to its position."""

    def __init__(self, page_bytes: int, widths: tuple[int, ...], block_size: int, rng: random.Random) -> None:
        super().__init__(page_bytes, total=1 << 16, rng=rng)
        self.widths, self.block_size = widths, block_size
        self.slots: dict[tuple[int, int], int] = {}
        self.exhaust = 0.0

    def execute(self, plan: StepPlan, tokens_of: dict[int, list[int]]) -> StepResult:
        before = set(self.mapped)
        mapped, stuck = self.apply(plan.delta)
        for tensor, page in before - self.mapped:
            self.forget(tensor, page)
        for source, target in plan.delta.copies if mapped else ():
            for offset in range(self.block_size):
                self.slots[target, offset] = self.slots[source, offset]
        drawn = self.run(plan.rows, tokens_of) if mapped else ()
        if mapped and plan.rows and self._rng.random() < self.exhaust:  # after all was written: nothing of it counts
            return StepResult(
                step=plan.step, mapped=True, observation=self.observe(), stuck=tuple(stuck), exhausted="full"
            )
        return StepResult(step=plan.step, mapped=mapped, observation=self.observe(), tokens=drawn, stuck=tuple(stuck))

    def forget(self, tensor: int, page: int) -> None:
        width = self.widths[tensor]
        for block in range(page * self.page_bytes // width, -(-(page + 1) * self.page_bytes // width)):
            for offset in range(self.block_size):
                self.slots.pop((block, offset), None)

    def run(self, rows: tuple[Row, ...], tokens_of: dict[int, list[int]]) -> tuple[TokenLogprob, ...]:
        """Write all rows' KV, then read each row's whole context, as a layer does."""
        for row in rows:
            for position in range(row.start, row.start + len(row.token_ids)):
                self.slots[self.slot(row, position)] = digest(tokens_of[row.sequence][: position + 1])
        for row in rows:
            known = tokens_of[row.sequence]
            assert row.token_ids == known[row.start : row.start + len(row.token_ids)]
            for position in range(row.start + len(row.token_ids)):
                held = self.slots.get(self.slot(row, position))
                assert held == digest(known[: position + 1]), f"sequence {row.sequence} reads wrong KV at {position}"
        return tuple(TokenLogprob(next_token(tokens_of[row.sequence]), 0.0) for row in rows if row.sampling is not None)

    def slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.blocks[position // self.block_size], position % self.block_size


def digest(tokens: list[int]) -> int:
    return hash(tuple(tokens))


def next_token(tokens: list[int]) -> int:
    """The model: a function of all tokens, over so few that sequences share prefixes by chance."""
    return (3 * tokens[-1] + len(tokens) + sum(tokens[-5:])) % 3


@dataclass
class Traffic:
    """Random requests, aborts, limits and neighbours for one scheduler; every plan is checked."""

    rng: random.Random
    limits: StepLimits
    is_virtual: bool = True
    has_prefix: bool = True
    clock: Clock = field(default_factory=Clock)
    alive: dict[int, Sequence] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        widths = self.rng.choice([(48,), (96, 32), (24, 24, 80)]) if self.is_virtual else (64,)
        self.ranks = Ranks(64 if self.is_virtual else 1, widths, 4, self.rng)
        self.cache = make_cache(
            spec_of(*widths),
            pages=60 if self.is_virtual else 40,
            page_bytes=64 if self.is_virtual else None,
            prefix_seed=1 if self.has_prefix else None,
            spare_pages=self.rng.choice((0, 4)),
            options={"clock": self.clock},
            limits={} if self.is_virtual else {"elastic": False, "arena_bytes": 40 * 64, "pool_bytes": 40 * 64},
        )
        self.cache.observe(self.ranks.observe())
        self.scheduler = Scheduler(self.cache, self.limits)

    # --- operations

    def arrive(self) -> None:
        self.seen["arrivals"] += 1
        number = self.seen["arrivals"]
        prompt = [self.rng.randrange(3) for _ in range(self.rng.choice((1, 3, 4, 8, 13, 24)))]
        if self.alive and self.rng.random() < 0.5:
            prompt = self.rng.choice(list(self.alive.values())).tokens[:24]
        most = max(1, min(self.rng.choice((1, 2, 9, 30)), self.cache.possible_tokens() + 1 - len(prompt)))
        request = Request(request_id=str(number), prompt_ids=prompt, sampling=SamplingParams(max_tokens=most, **GREEDY))
        sequence = Sequence(number, request, self.cache.open(), most, 0)
        if len(prompt) + most - 1 <= self.cache.possible_tokens():
            self.alive[number] = sequence
            self.scheduler.add(sequence)

    def abort(self) -> None:
        if self.alive:
            gone = self.alive.pop(self.rng.choice(list(self.alive)))
            self.scheduler.remove(gone)

    def disturb(self) -> None:
        """A limit, a neighbour, or bad luck with the device."""
        most = self.cache.possible_bytes()
        if self.rng.random() < 0.5:
            self.cache.set_limit(self.rng.choice((None, None, most // 3, most // 2)))
        self.ranks.taken_by_others = self.rng.choice((0, 0, self.ranks.total - most // 2, self.ranks.total))
        self.ranks.refuse, self.ranks.stick = self.rng.choice((0.0, 0.3, 0.9)), self.rng.choice((0.0, 0.0, 0.2))
        self.ranks.exhaust = self.rng.choice((0.0, 0.0, 0.2, 1.0))

    def calm(self) -> None:
        """The disturbance ends, but for some refusals."""
        self.cache.set_limit(None)
        self.ranks.taken_by_others, self.ranks.refuse, self.ranks.stick = 0, 0.1, 0.0
        self.ranks.exhaust = 0.01

    # --- a step

    def step(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.plan(self.clock.now)
        self.check_plan(plan)
        result = self.ranks.execute(plan, {number: list(s.tokens) for number, s in self.alive.items()})
        self.seen["rows"] += len(plan.rows)
        self.seen["refused"] += not result.mapped
        self.seen["exhausted"] += bool(result.exhausted)
        if result.exhausted:
            scheduler.break_off(plan, result)
        elif result.mapped:
            self.take(scheduler.commit(plan, result))
        else:
            scheduler.rollback(plan, result)
        self.check_state()
        self.clock.now += 0.004 if plan.rows else 0.05

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            sequence = self.alive[int(output.request_id)]
            assert output.token_ids == [next_token(sequence.tokens[:-1])]
            assert output.cached_tokens < output.prompt_tokens
            if output.finish is not None:
                assert sequence.num_generated == sequence.max_tokens
                assert sequence.tokens[: sequence.num_prompt] == sequence.request.prompt_ids
                del self.alive[sequence.number]
                self.seen["finished"] += 1

    def check_plan(self, plan: StepPlan) -> None:
        limits, running = self.limits, {s.number: s for s in self.scheduler.running}
        assert len(plan.rows) <= len(running) <= limits.sequences
        assert len({row.sequence for row in plan.rows}) == len(plan.rows)
        assert running.keys() >= {row.sequence for row in plan.rows}, "a row of one that gave way"
        assert sum(len(row.token_ids) for row in plan.rows) <= limits.tokens
        prefills = [len(row.token_ids) for row in plan.rows if not running[row.sequence].is_decoding]
        assert all(0 < count <= (limits.chunk or limits.tokens) for count in prefills)
        assert sum(prefills) <= (limits.prefill or limits.tokens)

    def check_state(self) -> None:
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        numbers = [s.number for s in (*running, *waiting)]
        assert numbers == sorted(self.alive), "by arrival, the running before the waiting"
        for sequence in running:
            assert len(sequence.table.blocks) == self.cache.blocks_for(sequence.computed)
            assert sequence.computed < len(sequence.tokens)
        assert not any(s.table.blocks or s.computed for s in waiting)
        self.cache.check()


LIMITS = [
    StepLimits(tokens=16, sequences=6, chunk=8, prefill=8),
    StepLimits(tokens=64, sequences=12, chunk=16, prefill=None, share_in_batch=True),
    StepLimits(tokens=26, sequences=3, chunk=None, prefill=None),
    StepLimits(tokens=5, sequences=8, chunk=3, prefill=4, share_in_batch=True),
]


@pytest.mark.parametrize("limits", LIMITS, ids=["chunked", "shared", "whole", "tight"])
@pytest.mark.parametrize("kind", ["virtual", "physical", "no-prefix"])
def test_random_plans_keep_every_promise(limits: StepLimits, kind: str):
    seed = SEEDS.randrange(1 << 32)
    print("seed", seed)
    traffic = Traffic(random.Random(seed), limits, is_virtual=kind != "physical", has_prefix=kind != "no-prefix")
    for _ in steps_until(lambda: min(traffic.seen["finished"], traffic.seen["exhausted"]) > 5, least=500, most=10_000):
        if traffic.rng.random() < 0.3 and len(traffic.alive) < 20:
            traffic.arrive()
        if traffic.rng.random() < 0.02:
            traffic.abort()
        if traffic.rng.random() < 0.05:
            traffic.disturb()
        traffic.step()
    traffic.calm()
    for _ in range(4000):
        if not traffic.alive:
            break
        traffic.step()
    assert not traffic.alive, f"starved: {sorted(traffic.alive)}"
    assert traffic.cache.bands()["kv_live"] == 0


# --- the engine

PAGE = 16 << 10  # blocks of 12 KiB straddle pages, those of a single layer's keys (2 KiB) share one
SLOTS = 56  # pages of cache: about 70 blocks of 16 tokens
FLAGS = {
    "dtype": "float32",
    "block_size": 16,
    "enable_vmm_kvcache": True,
    "vmm_elastic": True,
    "phy_page_granularity_size": PAGE,
    "max_tokens_per_chunk_for_prefill": 48,
    "memory_wait_seconds": 5,
}
VERBS = ("create", "map", "unmap", "destroy")
SECONDS = 2.0


class Client:
    """Submits, aborts and disturbs; keeps what each request was given."""

    def __init__(self, llm: LLM, driver: FaultyDriver, rng: random.Random) -> None:
        self.llm, self.driver, self.rng = llm, driver, rng
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.given: dict[str, list[int]] = {}
        self.ended: dict[str, Output] = {}
        self.aborted: set[str] = set()
        self.planned = 0
        self._bases = [[rng.randrange(250) for _ in range(150)] for _ in range(3)]

    def act(self) -> None:
        """Some of what clients, operators and devices do."""
        is_open = len(self.asked) - len(self.ended) - len(self.aborted) < 30
        odds = {self.submit: 0.15 * is_open, self.abort: 0.02, self.disturb: 0.07, self.limit: 0.03}
        for operation, odd in odds.items():
            if self.rng.random() < odd:
                operation()

    @property
    def has_seen_all(self) -> bool:
        """Everything that can go wrong has."""
        c, answered = self.llm.snapshot.counters, sum(output.error is None for output in self.ended.values())
        return min(c.preemptions, c.evicted_blocks, c.prefix_cache_hits, c.map_failures, answered - 10) > 0

    def submit(self) -> None:
        prompt = [*self.rng.choice(self._bases)[: self.rng.randrange(1, 150)], self.rng.randrange(250)]
        name, most = str(len(self.asked)), self.rng.randrange(1, 50)
        self.asked[name], self.given[name] = (prompt, most), []
        sampling = SamplingParams(max_tokens=most, **GREEDY)
        assert self.llm.engine.submit(Request(request_id=name, prompt_ids=prompt, sampling=sampling)) is None

    def abort(self) -> None:
        running = [name for name in self.asked if name not in self.ended and name not in self.aborted]
        if running:
            self.aborted.add(self.rng.choice(running))
            for name in self.aborted:  # those aborted before are no-ops
                self.llm.engine.abort(name)

    def disturb(self) -> None:
        verb = self.rng.choice(VERBS)
        nth = self.driver.counts()[f"{verb}_pages"] + self.rng.randrange(1, 30)
        self.driver.fail(verb, nth, verb in ("create", "map") and self.rng.random() < 0.5)
        self.planned += 1

    def limit(self) -> None:
        self.llm.engine._cache.set_limit(self.rng.choice((None, SLOTS // 2 * PAGE, SLOTS // 4 * PAGE)))

    def step(self) -> None:
        for output in self.llm.engine.step().outputs:
            assert output.request_id not in self.ended, "an output after the last"
            self.given[output.request_id] += output.token_ids
            if output.finish is not None:
                self.ended[output.request_id] = output
        self.llm.engine.check()
        memory = self.llm.memory()
        assert memory["physical"] == memory["mapped"] + memory["free_handles"] <= self.driver.memfd_bytes()
        self.llm.engine.rest()


@pytest.mark.parametrize("layout", ["interleaved", "per_layer"])
def test_random_traffic_over_failing_pages_gets_the_tokens_of_a_calm_engine(layout: str, monkeypatch):
    monkeypatch.setattr(CpuOps, "kv_layout", layout)
    monkeypatch.setattr(parts, "SPARE_BYTES", 4 * PAGE)  # few spares: pages come and go all the time
    seed = SEEDS.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    driver = FaultyDriver(open_driver("cpu", mode="4k", page_bytes=PAGE))
    llm = LLM(tiny_checkpoint("llama"), driver=driver, max_cache_size=SLOTS * PAGE, **FLAGS)
    client = Client(llm, driver, rng)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline or not client.has_seen_all:
        assert time.monotonic() < deadline + 60, llm.snapshot.counters
        client.act()
        client.step()
    llm.engine._cache.set_limit(None)
    deadline = time.monotonic() + 60
    while llm.engine.has_work:
        assert time.monotonic() < deadline
        client.step()
    assert any(llm.close() for _ in range(client.planned + 1))  # a planned failure may still come
    assert (driver.usage()["handles"], driver.usage()["ranges"], driver.memfd_bytes()) == (0, 0, 0)
    check_tokens(client)


def check_tokens(client: Client) -> None:
    """All that ended has the tokens of an engine without limits or faults, what was aborted the first of them."""
    names = list(client.asked)
    sampling = [SamplingParams(max_tokens=client.asked[name][1], **GREEDY) for name in names]
    with LLM(tiny_checkpoint("llama"), max_cache_size=64 << 20, **FLAGS) as calm:
        answers = calm.generate([client.asked[name][0] for name in names], sampling)
    for name, answer in zip(names, answers, strict=True):
        right, given = answer.token_ids, client.given[name]
        if name in client.aborted:
            assert given == right[: len(given)], name
        elif client.ended[name].error is None:
            assert given == right, name
        else:
            assert client.ended[name].error.code == "kv_memory_unavailable", client.ended[name]
