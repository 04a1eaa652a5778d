"""The acl driver on a device that fails: every vendor call, at every place, with every code that matters; a neighbour
that takes memory between the check and the call; undos that fail, too. Nothing is lost, nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from acl_emulation import (
    DEVICE_OUT_OF_MEMORY,
    DRIVER_FAILED,
    OUT_OF_MEMORY,
    PAGE,
    clean_emulator,
    held,
)
from ascendcl import Emulator
from cache_ops import Clock, make_cache, spec_of
from covering import steps_until
from driver_kinds import open_kind, peek, poke
from test_cache_pages import PagedOps, Rank

from xllm_cli.core import PageDelta, PageRef
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.driver import Driver, VmmError, VmmShortage
from xllm_cli.vmm.pool import PagePool
from xllm_cli.worker.kv_store import VirtualKvStore

TENSORS, PAGES = 3, 4
ALL = tuple(PageRef(tensor, page) for tensor in range(TENSORS) for page in range(PAGES))
FUNCTIONS = ("aclrtMallocPhysical", "aclrtFreePhysical", "aclrtMapMem", "aclrtUnmapMem")


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with clean_emulator() as emulator:
        yield emulator


class Bench:
    """A store over the driver, and a load that uses every verb; `failed` counts what went wrong in it."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator, self.driver = emulator, open_kind("acl")
        self.pool = PagePool(self.driver, page_bytes=PAGE)
        self.arenas = [Arena(self.driver, self.pool, PAGES * PAGE) for _ in range(TENSORS)]
        self.store = VirtualKvStore(self.arenas, self.pool, PAGE, fence=lambda: None)
        self.failed = 0

    def apply(self, map: Sequence[PageRef] = (), unmap: Sequence[PageRef] = ()) -> None:
        """One delta, tried until it is done; after each try all books agree."""
        wanted = set(self.store.mapped_of(ALL)) - set(unmap) | set(map)
        for _ in range(4):
            mapped = set(self.store.mapped_of(ALL))
            delta = PageDelta(map=tuple(set(map) - mapped), unmap=tuple(mapped.intersection(unmap)))
            outcome = self.store.apply(delta, 0)
            self.check()
            now = set(self.store.mapped_of(ALL))
            after = mapped | set(delta.map) if outcome.mapped else mapped
            assert now == after - set(delta.unmap) | set(outcome.stuck)
            if now == wanted:
                return
            self.failed += 1
        raise AssertionError("one planned failure, and four tries were not enough")

    def check(self) -> None:
        """The pool's, the driver's and the device's books say the same."""
        self.pool.check()
        usage, pages = self.driver.usage(), self.store.mapped_pages()
        assert self.pool.owned == self.pool.free_handles + pages
        assert (usage["handles"], usage["mapped"]) == held(self.emulator) == (self.pool.owned, pages)
        assert self.emulator.device()["used"] == self.pool.owned * PAGE

    def load(self) -> None:
        self.apply(map=ALL[:7])
        poke(self.arenas[1].address, b"kept")
        self.apply(map=ALL[7:], unmap=ALL[:3])
        self.trim()
        self.apply(map=ALL[:2], unmap=ALL[9:])
        assert peek(self.arenas[1].address, 4) == b"kept"
        self.apply(unmap=ALL[:9])
        self.trim()

    def trim(self) -> None:
        before = self.pool.free_handles
        self.store.trim()
        self.check()
        self.failed += self.pool.free_handles > 0
        self.store.trim()
        assert self.pool.free_handles == 0 <= before

    def close(self) -> None:
        assert self.store.close()
        assert self.driver.usage()["ranges"] == 0
        self.driver.close()


def test_a_load_without_faults_uses_every_function(emulator: Emulator) -> None:
    bench = Bench(emulator)
    bench.load()
    assert bench.failed == 0 and min(emulator.calls(name) for name in FUNCTIONS) >= 8
    bench.close()


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, DEVICE_OUT_OF_MEMORY, DRIVER_FAILED])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_call_failing_once_loses_nothing(emulator: Emulator, function: str, code: int) -> None:
    bench = Bench(emulator)
    bench.load()
    calls = emulator.calls(function)
    for nth in range(1, calls + 1):
        bench.failed = 0
        emulator.reset()
        emulator.inject(function, code, nth=nth)
        bench.load()
        assert emulator.counters()[function].injected == 1
        assert bench.failed == 1, f"call {nth} of {calls}"
    bench.close()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("undo", ["aclrtUnmapMem", "aclrtFreePhysical"])
def test_an_undo_that_fails_too_is_made_up_for(emulator: Emulator, undo: str, count: int) -> None:
    bench = Bench(emulator)
    bench.apply(map=ALL[:2])
    failing = "aclrtMapMem" if undo == "aclrtUnmapMem" else "aclrtMallocPhysical"
    emulator.inject(failing, OUT_OF_MEMORY, nth=4)
    emulator.inject(undo, DRIVER_FAILED, count=count)
    assert not bench.store.apply(PageDelta(map=ALL[4:8], unmap=()), 0).mapped
    assert undo in bench.driver.last_failure()
    for _ in range(3):
        bench.store.apply(PageDelta(map=(), unmap=()), 0)
        bench.store.trim()
    bench.apply(map=ALL[4:8])
    bench.load()
    bench.close()


# --- what a failure is ---------------------------------------------------------------------------------------------


@pytest.fixture
def driver(emulator: Emulator) -> Iterator[Driver]:
    driver = open_kind("acl")
    yield driver
    driver.close()


@pytest.mark.parametrize("code", [100000, 107000, 107002, 107017, 207000, 507015, DRIVER_FAILED])
@pytest.mark.parametrize("function", ["aclrtReserveMemAddress", "aclrtMallocPhysical", "aclrtMapMem"])
def test_only_two_codes_mean_try_again(driver: Driver, emulator: Emulator, function: str, code: int) -> None:
    start = driver.reserve(PAGE)
    (handle,) = driver.create(1)
    verbs = {
        "aclrtReserveMemAddress": lambda: driver.reserve(PAGE),
        "aclrtMallocPhysical": lambda: driver.create(1),
        "aclrtMapMem": lambda: driver.map([(start, handle)]),
    }
    for shortage in (OUT_OF_MEMORY, DEVICE_OUT_OF_MEMORY):
        emulator.inject(function, shortage)
        with pytest.raises(VmmShortage, match=function):
            verbs[function]()
    emulator.inject(function, code)
    with pytest.raises(VmmError, match=function) as caught:
        verbs[function]()
    assert type(caught.value) is VmmError and caught.value.code == code


def test_an_error_carries_the_vendors_text_on_one_line(driver: Driver, emulator: Emulator) -> None:
    emulator.inject("aclrtMapMem", DRIVER_FAILED)
    start, (handle,) = driver.reserve(PAGE), driver.create(1)
    with pytest.raises(VmmError) as caught:
        driver.map([(start, handle)])
    assert caught.value.address == start and "was injected by the script" in caught.value.text
    assert "\n" not in str(caught.value) and str(caught.value).endswith("(code 507899)")


def test_what_could_not_be_taken_away_says_why(driver: Driver, emulator: Emulator) -> None:
    start, (handle,) = driver.reserve(PAGE), driver.create(1)
    driver.map([(start, handle)])
    assert driver.last_failure() == ""
    emulator.inject("aclrtUnmapMem", DRIVER_FAILED)
    assert driver.unmap([start]) == [start]
    assert driver.last_failure().startswith(f"unmap at {start:#x}: aclrtUnmapMem: ")
    emulator.inject("aclrtFreePhysical", 107000)
    assert driver.unmap([start]) == [] and driver.destroy([handle]) == [handle]
    assert driver.last_failure().endswith("(code 107000)")


def test_a_range_that_cannot_be_released_stays(driver: Driver, emulator: Emulator) -> None:
    start = driver.reserve(PAGE)
    emulator.inject("aclrtReleaseMemAddress", DRIVER_FAILED)
    with pytest.raises(VmmError, match="aclrtReleaseMemAddress"):
        driver.release(start, PAGE)
    assert driver.usage()["ranges"] == 1
    driver.release(start, PAGE)


def test_a_device_that_cannot_be_asked_is_an_error(driver: Driver, emulator: Emulator) -> None:
    emulator.inject("aclrtGetMemInfo", DRIVER_FAILED)
    with pytest.raises(VmmError, match="aclrtGetMemInfo") as caught:
        driver.info()
    assert caught.value.op == "info" and driver.info().free == 64 * PAGE


# --- neighbours ----------------------------------------------------------------------------------------------------


def test_a_neighbour_between_the_check_and_the_call_is_a_shortage(emulator: Emulator) -> None:
    bench = Bench(emulator)
    bench.apply(map=ALL[:2])
    free = emulator.device()["free"]
    for nth in (1, 2, 3, 4):
        emulator.neighbour(free - (nth - 1) * PAGE, before="aclrtMallocPhysical", nth=nth)
        outcome = bench.store.apply(PageDelta(map=ALL[2:6], unmap=()), 0)
        assert not outcome.mapped and "aclrtMallocPhysical" in outcome.shortage and "207001" in outcome.shortage
        bench.check()
        emulator.neighbour(-free)
    bench.apply(map=ALL[2:6])
    assert bench.failed == 0
    bench.apply(unmap=ALL[:6])
    bench.close()


def test_a_neighbour_is_seen_at_once(driver: Driver, emulator: Emulator) -> None:
    pool = PagePool(driver, page_bytes=PAGE)
    emulator.neighbour(emulator.device()["free"] - 5 * PAGE)
    assert driver.info().free == 5 * PAGE
    assert pool.take(3, keep_free=3 * PAGE) is None and "free memory" in pool.last_shortage
    pool.give(pool.take(3, keep_free=2 * PAGE) or [])
    assert pool.trim() == 3 and driver.info().free == 5 * PAGE


# --- everything above ----------------------------------------------------------------------------------------------


class VendorFaults(Rank):
    """A rank whose vendor calls fail now and then."""

    emulator: Emulator

    def apply(self, delta: PageDelta) -> tuple[bool, Sequence[PageRef]]:
        if self._rng.random() < 0.2:
            function = self._rng.choice(FUNCTIONS)
            code = self._rng.choice((OUT_OF_MEMORY, DRIVER_FAILED)) if "Un" not in function else DRIVER_FAILED
            self.emulator.inject(function, code, nth=self._rng.randrange(1, 4))
        outcome = super().apply(delta)
        usage = self._driver.usage()
        assert (usage["handles"], usage["mapped"]) == held(self.emulator)
        return outcome


@pytest.mark.parametrize("fixed", [False, True], ids=["elastic", "fixed"])
def test_random_cache_operations_over_failing_vendor_calls(emulator: Emulator, fixed: bool) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng, clock, pages = random.Random(seed), Clock(), 30
    limits = {"elastic": not fixed, "pool_bytes": pages * PAGE, "reserve": 4 * PAGE}
    spec = spec_of(700_000, 700_000, 250_000)
    cache = make_cache(spec, limits=limits, options={"clock": clock}, pages=pages, page_bytes=PAGE, spare_pages=6)
    rank = VendorFaults(cache, open_kind("acl", pages=pages), rng, fixed=fixed)
    rank.emulator = emulator
    ops = PagedOps(cache, rank.apply, rank.observe, clock=clock, rng=rng).over(rank)

    def has_seen_all() -> bool:
        injected = sum(count.injected for count in emulator.counters().values())
        return min(cache.counters.map_failures, cache.counters.prefix_hits, rank.stuck, injected - 20) > 0

    for _ in steps_until(has_seen_all, least=1200, most=24_000):
        ops.step()
        assert sum(arena.mapped_pages for arena in rank.arenas) * PAGE == cache.bands()["mapped"]
    ops.drain()
    rank.close()
