"""The home of parameters: handed out once, moved as a whole, whatever the device refuses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from xllm_cli.errors import MemoryShortage
from xllm_cli.vmm.driver import Driver, FaultyDriver, VmmError, open_driver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.vmm.weights import FILL_PAGES, WeightArena

PAGE = 4096


class Home:
    """An arena of parameters over a driver whose calls can be made to fail, and what they should hold."""

    def __init__(self, total_bytes: int | None = None, *, fixed_pages: int | None = None) -> None:
        self.driver: Driver = FaultyDriver(open_driver("cpu", page_bytes=PAGE, total_bytes=total_bytes))
        self.pool = PagePool(self.driver, page_bytes=PAGE, fixed_pages=fixed_pages)
        self.arena = WeightArena(self.driver, self.pool, 400 * PAGE)
        self.tensors: list[torch.Tensor] = []
        self.copies: list[torch.Tensor] = []

    def load(self, sizes: list[int]) -> bytes:
        """Parameters of so many floats; all bytes of the arena."""
        for size in sizes:
            tensor = self.arena.take([size], torch.float32)
            tensor.copy_(torch.randn(size))
            self.tensors.append(tensor)
            self.copies.append(tensor.clone())
        return self.backup()

    def backup(self) -> bytes:
        parts: list[bytes] = []
        self.arena.read(lambda chunk, offset: parts.append(chunk.numpy().tobytes()))
        return b"".join(parts)

    def check(self) -> None:
        self.arena.check()
        self.pool.check()
        if self.arena.state == "resident":
            assert all(map(torch.equal, self.tensors, self.copies))

    def close(self) -> None:
        self.tensors.clear()
        assert self.arena.close()
        self.pool.close()
        assert (self.driver.usage()["handles"], self.driver.usage()["ranges"]) == (0, 0)


def filler(backup: bytes):
    def fill(chunk: torch.Tensor, offset: int) -> None:
        chunk.numpy()[:] = memoryview(backup)[offset : offset + len(chunk)]

    return fill


@pytest.fixture
def home() -> Iterator[Home]:
    made = Home()
    yield made
    made.close()


def test_parameters_lie_close_together_and_at_cache_lines(home: Home) -> None:
    home.load([1, 1000, 5000, 3])
    places = [tensor.data_ptr() for tensor in home.tensors]
    assert all(place % 64 == 0 for place in places) and places == sorted(places)
    assert home.arena.mapped_bytes - home.arena.used < PAGE
    home.check()


def test_parking_keeps_the_pages_and_waking_brings_the_same_bytes(home: Home) -> None:
    home.load([3000, 3000])
    calls = home.driver.counts()["create"]
    home.arena.park()
    assert (home.arena.mapped_bytes, home.arena.kept_bytes) == (0, home.arena.pages * PAGE)
    home.arena.unpark()
    home.check()
    assert home.driver.counts()["create"] == calls, "no page is made anew"


def test_discarding_gives_all_pages_back_and_restoring_fills_new_ones(home: Home) -> None:
    backup = home.load([FILL_PAGES * 3000, 77])
    home.arena.discard()
    home.pool.trim()
    assert home.driver.usage()["handles"] == 0
    assert home.arena.restore(filler(backup)) == ""
    home.check()
    assert home.backup() == backup


def test_what_does_not_fit_is_a_shortage_with_numbers() -> None:
    home = Home(total_bytes=8 * PAGE)
    with pytest.raises(MemoryShortage, match=r"bytes wanted, \d+ free"):
        home.load([20 * PAGE // 4])
    home.check()
    home.close()


def test_waking_without_memory_changes_nothing_and_works_later() -> None:
    home = Home(fixed_pages=10)
    backup = home.load([6 * PAGE // 4])
    home.arena.discard()
    taken = home.pool.take(7)
    assert taken is not None
    assert "fixed pool" in home.arena.restore(filler(backup))
    home.check()
    assert home.arena.mapped_bytes == 0
    home.pool.give(taken)
    assert home.arena.restore(filler(backup)) == ""
    home.check()
    home.close()


def test_a_backup_that_cannot_be_read_leaves_it_absent(home: Home) -> None:
    backup = home.load([2 * FILL_PAGES * PAGE // 4])

    def broken(chunk: torch.Tensor, offset: int) -> None:
        if offset:
            raise OSError("a disk")
        filler(backup)(chunk, offset)

    home.arena.discard()
    with pytest.raises(OSError, match="a disk"):
        home.arena.restore(broken)
    home.check()
    assert (home.arena.state, home.arena.mapped_bytes) == ("absent", 0)
    assert home.arena.restore(filler(backup)) == ""


@pytest.mark.parametrize("shortage", [True, False])
@pytest.mark.parametrize("verb", ["create", "map", "unmap", "destroy"])
def test_a_fault_at_any_call_of_a_cycle_is_retried_to_the_same_bytes(verb: str, shortage: bool) -> None:
    calls = failing_cycle(verb, 10_000, shortage)[1]
    assert calls >= 1
    for nth in range(1, calls + 1):
        failures, _ = failing_cycle(verb, nth, shortage)
        assert failures == (0 if verb == "destroy" else 1), "what is not destroyed stays free, and is used again"


def failing_cycle(verb: str, nth: int, shortage: bool) -> tuple[int, int]:
    """(how often a verb failed, the calls made) in a cycle whose `nth` call fails."""
    home = Home()
    backup = home.load([FILL_PAGES * PAGE // 4 + 5 * PAGE])
    home.driver.reset_counts()
    home.driver.fail(verb, nth, shortage)
    failures = cycle(home, backup)
    calls = home.driver.counts()[verb]
    home.check()
    assert home.backup() == backup
    home.close()
    return failures, calls


def cycle(home: Home, backup: bytes) -> int:
    """park, unpark, discard, trim, restore; each until it works. How often one did not."""
    failures = 0
    for verb in (home.arena.park, home.arena.unpark, home.arena.discard, home.pool.trim):
        while True:
            try:
                verb()
                break
            except VmmError:
                failures += 1
                home.check()
    while home.arena.state != "resident":
        try:
            failures += bool(home.arena.restore(filler(backup)))
        except VmmError:
            failures += 1
        home.check()
    return failures


def test_random_verbs_with_random_faults_keep_the_books() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    numbers = random.Random(seed)
    home = Home()
    backup = home.load([numbers.randrange(1, 24 * PAGE) for _ in range(4)])
    for _ in range(400):
        home.driver.reset_counts()
        if numbers.random() < 0.4:
            home.driver.fail(numbers.choice(["create", "map", "unmap", "destroy"]), 1, numbers.random() < 0.5)
        with suppress(VmmError):
            verb(home, numbers, backup)
        home.check()
    home.driver.reset_counts()
    while home.arena.state != "resident":
        with suppress(VmmError):
            verb(home, numbers, backup)
    cycle(home, backup)  # every verb once: a fault that is still planned would else hit the closing
    assert home.backup() == backup
    home.close()


def verb(home: Home, numbers: random.Random, backup: bytes) -> None:
    match home.arena.state:
        case "resident":
            numbers.choice([home.arena.park, home.arena.discard])()
        case "parked":
            numbers.choice([home.arena.unpark, home.arena.discard])()
        case "absent":
            home.arena.restore(filler(backup))
    if numbers.random() < 0.3:
        home.pool.trim()
