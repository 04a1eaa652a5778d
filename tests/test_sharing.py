"""Names that share one model's parameters: the pages are as the shallowest wants them, whatever the order, whoever
goes, and whatever the device refuses."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from test_weights import PAGE, Model

from xllm_cli.worker.sharing import DEPTH, WeightsShare
from xllm_cli.worker.weights import State, WeightsError

NAMES = 3
VERBS = ("create", "map", "unmap")
ORDERS = 300
FAULTS = 3


class Short(Exception):
    """There were no pages to wake."""


class Names:
    """Names over one model, each with the state it must be in: what it last asked for."""

    def __init__(self, *, with_copy: bool = True, count: int = NAMES) -> None:
        self.model = Model(with_copy=with_copy)
        self.pages = self.model.arena.pages
        self.shares = [WeightsShare(self.model.weights) for _ in range(count)]
        self.wanted: list[State] = ["awake"] * count

    @property
    def open(self) -> list[int]:
        """Who has not closed."""
        return [name for name, share in enumerate(self.shares) if share in self.model.weights.users]

    def choices(self, name: int) -> dict[str, Callable[[], object]]:
        """What this name may ask for now."""
        share, state = self.shares[name], self.shares[name].state
        found: dict[str, Callable[[], object]] = {"give_up": share.give_up, "close": share.close}
        if state == "awake":
            found["parked"] = share.park
        else:
            found["awake"] = share.wake
        if state in ("awake", "parked"):
            found["light"] = lambda: share.sleep(1)
        if state != "deep":
            found["deep"] = lambda: share.sleep(2)
        return found

    def ask(self, name: int, what: str) -> None:
        """It is done, and what must come of it is remembered."""
        came_from = self.shares[name].state
        came = self.choices(name)[what]()
        if what == "give_up":
            self.wanted[name] = "light" if came_from == "parked" else self.wanted[name]
        elif what == "awake":
            if came:
                raise Short(came)
            self.wanted[name] = "awake"
        elif what != "close":
            self.wanted[name] = what  # type: ignore[assignment]

    def check(self) -> None:
        """Every name is where it wants to be, and the pages where the shallowest does."""
        self.model.check()
        states = [self.wanted[name] for name in self.open]
        assert [self.shares[name].state for name in self.open] == states
        shallowest = min(states, key=DEPTH.__getitem__)
        weights = self.model.weights
        held = {"awake": (self.pages, 0), "parked": (0, self.pages)}.get(shallowest, (0, 0))
        assert (weights.state, weights.mapped_bytes // PAGE, weights.parked_bytes // PAGE) == (shallowest, *held)
        assert self.model.pool.owned == sum(held) == self.model.driver.usage()["handles"]
        for name in self.open:
            self.shares[name].check()

    def check_truth(self) -> None:
        """As check(), while the device may keep a page or the pool one that is free."""
        self.model.check()
        pages = self.model.weights.state  # parked at worst, where the device refuses both ways
        states = [max(self.wanted[name], pages, key=DEPTH.__getitem__) for name in self.open]
        assert [self.shares[name].state for name in self.open] == states
        assert pages in ("parked", "awake") or pages in [self.wanted[name] for name in self.open]
        for name in self.open:
            self.shares[name].check()
        pool, weights = self.model.pool, self.model.weights
        held = (weights.mapped_bytes + weights.parked_bytes) // PAGE
        assert pool.owned == held + pool.free_handles == self.model.driver.usage()["handles"]

    def close(self) -> None:
        """Nothing is left, if need be a little later."""
        self.model.tensors.clear()
        for share in self.shares:
            share.close()
        assert any(self.model.pool.close_again() for _ in range(2 * FAULTS))
        assert all(share.close() for share in self.shares), "twice changes nothing"
        assert any(self.model.pool.close() for _ in range(2 * FAULTS))
        assert (self.model.driver.usage()["handles"], self.model.driver.usage()["ranges"]) == (0, 0)


@pytest.mark.parametrize("with_copy", [True, False], ids=["copy", "no copy"])
def test_any_order_leaves_every_name_where_it_wants_to_be(with_copy: bool) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    numbers = random.Random(seed)
    for _ in range(ORDERS // 10):
        names = Names(with_copy=with_copy, count=numbers.randrange(1, NAMES + 1))
        for _ in range(10):
            name = numbers.choice(names.open)
            asks = [what for what in names.choices(name) if what != "close" or len(names.open) > 1]
            what = numbers.choice(asks)
            print(name, what)
            names.ask(name, what)
            names.check()
        names.close()


@pytest.mark.parametrize("first", ["light", "deep", "parked", "awake"])
@pytest.mark.parametrize("second", ["light", "deep", "parked", "awake"])
def test_a_name_that_comes_later_finds_the_pages_as_they_are(first: State, second: State) -> None:
    names = Names(count=2)
    for name, state in enumerate((first, second)):
        if state != "awake":
            names.ask(name, state)
    names.shares.append(WeightsShare(names.model.weights))
    names.wanted.append("deep" if first == second == "deep" else "awake" if "awake" in (first, second) else "light")
    names.check()
    if names.wanted[2] != "awake":
        names.ask(2, "awake")
    names.check()
    names.close()


def test_waking_a_second_name_moves_nothing() -> None:
    names = Names(count=2)
    names.ask(0, "deep")
    names.model.driver.fail("create", 1, True)
    names.model.driver.fail("map", 1, True)
    names.ask(0, "awake")
    names.check()
    names.close()


def test_the_last_name_gives_everything_back() -> None:
    names = Names(count=2)
    assert names.shares[0].close() and names.model.pool.owned == names.pages
    names.check()
    names.model.tensors.clear()
    assert names.shares[1].close() and names.model.pool.free_handles == names.pages
    assert names.model.pool.close() and names.model.driver.usage()["handles"] == 0


def test_parked_pages_go_with_the_last_that_parks() -> None:
    names = Names(count=2)
    for name in (0, 1):
        names.ask(name, "parked")
    assert names.shares[0].give_up() == 0 and names.shares[0].state == "light"
    assert names.shares[1].give_up() == names.pages * PAGE
    assert names.shares[1].give_up() == 0
    names.wanted = ["light", "light"]
    names.check()
    names.close()


# --- a device that refuses


@pytest.mark.parametrize("shortage", [True, False], ids=["shortage", "failure"])
@pytest.mark.parametrize("verb", VERBS)
def test_whatever_is_refused_nobody_is_told_what_is_not_so(verb: str, shortage: bool) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    numbers = random.Random(seed)
    for _ in range(ORDERS // 30):
        names = Names(count=numbers.randrange(1, NAMES + 1))
        names.model.driver.reset_counts()
        for nth in numbers.sample(range(1, 8 * names.pages), FAULTS):
            names.model.driver.fail(verb, nth, shortage)
            names.model.driver.fail(numbers.choice(VERBS), nth, not shortage)
        for _ in range(10):
            name = numbers.choice(names.open)
            asks = [what for what in names.choices(name) if what != "close" or len(names.open) > 1]
            what = numbers.choice(asks)
            print(name, what)
            ask_until_done(names, name, what)
        names.close()


def ask_until_done(names: Names, name: int, what: str) -> None:
    """Again and again while the device refuses; after each try all that is said must be true."""
    for _ in range(4 * FAULTS):
        share = names.shares[name]
        before = share.state
        if what not in names.choices(name):
            return  # refused, and set aside: there is nothing to park then
        try:
            names.ask(name, what)
        except (WeightsError, Short):
            assert share.state in (before, "parked") and (share.state == before or before == "awake")
            names.check_truth()
        else:
            names.check_truth()
            return
    raise AssertionError("refused too often")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("change", ["light", "deep", "parked", "awake", "close"])
def test_every_step_may_be_refused_and_tried_again(verb: str, change: str) -> None:
    for nth in range(1, 8):
        names = Names(count=2)
        names.ask(1, "light")
        if change in ("deep", "awake"):
            names.ask(0, "light")
        names.model.driver.reset_counts()
        names.model.driver.fail(verb, nth, False)
        print(nth)
        ask_until_done(names, 0, change)
        if change == "close":
            names.model.pool.close_again()
        names.check()
        names.close()


def test_pages_that_only_sleepers_have_and_the_device_keeps_leave_later() -> None:
    names = Names(count=2)
    names.ask(1, "light")
    names.model.driver.reset_counts()
    names.model.driver.fail("unmap", 2, False)
    names.ask(0, "close")
    assert names.model.weights.state == "awake" and names.shares[1].state == "light"
    names.check_truth()
    names.model.pool.close_again()
    names.check()
    names.close()


def test_a_tensor_that_lives_keeps_the_range(caplog: pytest.LogCaptureFixture) -> None:
    names = Names(count=1)
    kept: torch.Tensor = names.model.tensors[0]
    names.model.tensors.clear()
    assert not names.shares[0].close() and "views alive" in caplog.text
    del kept
    assert names.model.weights.close()
