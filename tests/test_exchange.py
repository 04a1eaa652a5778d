"""Memory that changes hands between engines of one device: real engines, real sockets, a simulated accelerator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from simulated import BLOCK_BYTES, PAGE, Accelerator

from xllm_cli import LLM
from xllm_cli.core import Request, SamplingParams
from xllm_cli.engine.exchange import Exchange
from xllm_cli.neighbours import peers
from xllm_cli.neighbours.peers import Neighbours

DEVICE = 32 * PAGE
BLOCKS = 8 * PAGE // BLOCK_BYTES  # that all engines have together: somebody else has the rest


def prompt(blocks: int, first: int) -> list[int]:
    return [(first * 41 + place * 3) % 250 for place in range(16 * blocks)]


class Engine:
    """An engine among neighbours, stepped by hand as its loop would."""

    def __init__(self, llm: LLM, exchange: Exchange) -> None:
        self.llm, self.exchange = llm, exchange
        self.served = 0

    def turn(self) -> None:
        self.exchange.give()
        snapshot = self.llm._host.step().snapshot
        assert snapshot is not None
        self.exchange.settle(snapshot)

    def start(self, ids: list[int], max_tokens: int = 1) -> None:
        self.served += 1
        wanted = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        assert self.llm.engine.submit(Request(request_id=str(self.served), prompt_ids=ids, sampling=wanted)) is None

    def run(self, ids: list[int]) -> None:
        self.start(ids)
        while self.llm.engine.has_work:
            self.turn()

    @contextmanager
    def turning(self) -> Iterator[None]:
        """As its own process would, on another thread."""
        stop = threading.Event()

        def loop() -> None:
            while not stop.wait(0.001):
                self.turn()

        thread = threading.Thread(target=loop)
        thread.start()
        yield
        stop.set()
        thread.join()

    @property
    def evicted(self) -> int:
        return self.llm.snapshot.counters.evicted_blocks

    @property
    def counters(self) -> dict[str, int]:
        return self.llm.memory()["neighbours"]


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], Engine]]:
    """Engines on one device. An answer is waited for as long as this machine takes for it."""
    monkeypatch.setattr(peers, "OLDER_SECONDS", 0.0)
    monkeypatch.setattr(peers, "ANSWER_PATIENCE", 20.0)
    accelerator = Accelerator(DEVICE)
    accelerator.device.peer = DEVICE - 8 * PAGE
    made: list[Engine] = []

    def join(name: str) -> Engine:
        llm = accelerator.serve(monkeypatch)
        exchange = Exchange(llm._host, Neighbours(tmp_path, model_id=name, device="simulated"))
        made.append(Engine(llm, exchange))
        return made[-1]

    yield join
    for one in made:
        one.exchange.close()
        one.llm.engine.check()
        one.llm.close()


def test_what_a_neighbour_remembers_goes_before_younger_prefixes_here(join: Callable[[str], Engine]) -> None:
    rich, poor = join("rich"), join("poor")
    for number in range(6):
        rich.run(prompt(BLOCKS // 8, number))
    with rich.turning():
        for number in range(10, 14):
            poor.run(prompt(BLOCKS // 8, number))
        hits = poor.llm.snapshot.counters.prefix_cache_hits
        poor.run(prompt(BLOCKS // 8, 10))
        assert poor.llm.snapshot.counters.prefix_cache_hits - hits == 16 * (BLOCKS // 8 - 1)
    assert poor.evicted == 0 < rich.evicted
    assert poor.counters["received"] == rich.counters["given"] > 0


def test_what_a_neighbour_used_later_stays_there(join: Callable[[str], Engine]) -> None:
    poor, rich = join("poor"), join("rich")
    for number in range(4):
        poor.run(prompt(BLOCKS // 8, number))
    rich.run(prompt(BLOCKS // 4, 10))
    with rich.turning():
        for number in range(4, 8):
            poor.run(prompt(BLOCKS // 8, number))
    assert poor.evicted > 0 == rich.evicted
    assert poor.counters["asked"] == rich.counters["given"] == 0


def test_a_request_gets_even_what_was_used_later(join: Callable[[str], Engine]) -> None:
    rich, poor = join("rich"), join("poor")
    rich.run(prompt(BLOCKS // 2, 1))
    with rich.turning():
        poor.run(prompt(BLOCKS * 3 // 4, 2))
    assert poor.counters["received"] == rich.counters["given"] >= (BLOCKS // 4 - 1) * BLOCK_BYTES


def test_nothing_in_use_is_given(join: Callable[[str], Engine]) -> None:
    busy, poor = join("busy"), join("poor")
    busy.start(prompt(BLOCKS // 2, 1), max_tokens=8)
    busy.turn()
    poor.start(prompt(BLOCKS * 3 // 4, 2))
    for _ in range(3):
        poor.turn()
        busy.turn()
    assert busy.llm.memory()["kv_live"] >= BLOCKS // 2 * BLOCK_BYTES
    assert busy.counters["given"] == poor.llm.memory()["kv_live"] == 0
    with busy.turning():
        while poor.llm.engine.has_work:
            poor.turn()
    assert busy.counters["given"] == poor.counters["received"] > 0, "once its request had ended"


def test_a_neighbour_that_is_gone_is_not_waited_for(join: Callable[[str], Engine]) -> None:
    gone, poor = join("gone"), join("poor")
    gone.run(prompt(BLOCKS // 2, 1))
    gone.exchange.close()
    for number in range(6):
        poor.run(prompt(BLOCKS // 8, number))
    assert poor.evicted > 0 == poor.counters["asked"]


def test_a_neighbour_that_is_mute_costs_patience_once(
    join: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    mute, poor = join("mute"), join("poor")
    mute.run(prompt(BLOCKS // 2, 1))
    monkeypatch.setattr(peers, "ANSWER_PATIENCE", 0.001)
    for number in range(6):
        poor.run(prompt(BLOCKS // 8, number))
    assert poor.evicted > 0 == poor.counters["received"]
    assert poor.counters["asked"] > 0
