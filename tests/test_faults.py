"""Every driver call fails once, one run per position: requests end right, invariants hold, no page leaks.

One engine over a FaultyDriver serves the same small load again and again; the driver counts pages per verb, so every
page of every batch is a position of its own. Answers are compared with those of the run without faults.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checkpoints import tiny_checkpoint

from xllm_cli import LLM
from xllm_cli.core import PageDelta, PageRef, SamplingParams
from xllm_cli.engine import parts
from xllm_cli.errors import XllmError
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.driver import FaultyDriver, VmmError, open_driver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.worker.kv_store import VirtualKvStore

WAVES, WIDTH = 7, 3
# blocks of 1.5 pages of 2 MiB: they straddle, and every sequence needs pages of its own
FLAGS = {"dtype": "float32", "block_size": 4096, "enable_vmm_kvcache": True, "vmm_elastic": True}
CACHE_BYTES = 64 << 20
VERBS = ("create", "destroy", "map", "unmap")


class Bench:
    """An engine over a faulty driver, and the answers it gave without faults."""

    def __init__(self, mode: str, **flags: object) -> None:
        self.driver = FaultyDriver(open_driver("cpu", mode=mode))
        self.llm = LLM(tiny_checkpoint("llama"), driver=self.driver, max_cache_size=CACHE_BYTES, **FLAGS, **flags)
        self.settle()
        self.driver.reset_counts()
        self.right = self.serve()
        self.settle()
        counts = self.driver.counts()
        self.pages = {verb: counts[f"{verb}_pages"] for verb in VERBS}

    def serve(self) -> list[list[int]]:
        """Waves of short requests: each wave maps its pages and gives them back."""
        wanted = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        answers = []
        for wave in range(WAVES):
            prompts = [[(31 * wave + 7 * i + j) % 250 for j in range(5 + i)] for i in range(WIDTH)]
            completions = self.llm.generate(prompts, wanted)
            self.llm.idle()
            self.llm.engine.check()
            answers += [c.token_ids if c.error is None else [c.error.status] for c in completions]
        return answers

    def settle(self) -> None:
        """Idle steps until everything mapped has gone back."""
        for _ in range(4):
            self.llm.idle()
        self.llm.engine.check()

    def leaked(self) -> list[str]:
        """What is still there after the load, in words."""
        memory, usage = self.llm.memory(), self.driver.usage()
        held = {key: memory[key] for key in ("mapped", "physical", "free_handles", "kv_live") if memory[key]}
        return [str(held)] * bool(held) + [str(usage)] * bool(usage["handles"] or self.driver.memfd_bytes())


@pytest.fixture(scope="module", params=["huge", "4k"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "SPARE_BYTES", 0)  # no spares: every wave gives its pages back and creates them again
        made = Bench(request.param, enable_prefix_cache=False)
        yield made
        assert made.llm.close()


def test_a_clean_run_makes_enough_driver_calls(bench: Bench):
    assert all(bench.pages[verb] >= 30 for verb in VERBS), bench.pages
    assert bench.leaked() == []


# taking away is never short of memory
FAULTS = [("create", True), ("map", True), *((verb, False) for verb in VERBS)]


@pytest.mark.parametrize(("verb", "shortage"), FAULTS)
def test_each_call_failing_once_changes_no_answer_and_leaks_nothing(bench: Bench, verb: str, shortage: bool):
    for nth in range(1, bench.pages[verb] + 1):
        bench.driver.reset_counts()
        bench.driver.fail(verb, nth, shortage)
        assert bench.serve() == bench.right, f"{verb} {nth}"
        bench.settle()
        assert bench.leaked() == [], f"{verb} {nth}"


def test_cached_blocks_survive_failing_calls():
    made = Bench("huge", enable_prefix_cache=True)
    for verb in VERBS:
        for nth in range(1, made.pages[verb] + 1, 5):
            made.driver.reset_counts()
            made.driver.fail(verb, nth, False)
            assert made.serve() == made.right, f"{verb} {nth}"
    assert made.llm.close()


def test_a_failing_reserve_ends_the_start_cleanly():
    driver = FaultyDriver(open_driver("cpu"))
    driver.fail("reserve", 1, False)
    with pytest.raises((XllmError, VmmError)):
        LLM(tiny_checkpoint("llama"), driver=driver, max_cache_size=CACHE_BYTES, **FLAGS)
    assert driver.usage()["handles"] == 0


def test_a_failing_release_keeps_the_range_and_says_so():
    driver = FaultyDriver(open_driver("cpu"))
    llm = LLM(tiny_checkpoint("llama"), driver=driver, max_cache_size=CACHE_BYTES, **FLAGS)
    driver.reset_counts()
    driver.fail("release", 1, False)
    assert not llm.close()
    assert driver.usage()["handles"] == 0
    assert llm.close() and driver.usage()["ranges"] == 0


def test_a_page_that_is_not_destroyed_is_given_back_by_the_next_close():
    driver = FaultyDriver(open_driver("cpu"))
    llm = LLM(tiny_checkpoint("llama"), driver=driver, max_cache_size=CACHE_BYTES, **FLAGS)
    llm.generate([[1] * 40], SamplingParams(max_tokens=1))
    driver.reset_counts()
    driver.fail("destroy", 1, False)
    assert not llm.close()
    assert driver.usage()["handles"] == 1
    assert llm.close()
    assert driver.usage()["handles"] == 0


def check_that_a_half_made_delta_is_undone():
    """Two tensors; the second one's page fails to map: the first one's must go."""
    driver = FaultyDriver(open_driver("cpu", mode="4k", page_bytes=65536))
    pool = PagePool(driver, page_bytes=65536)
    store = VirtualKvStore([Arena(driver, pool, 65536) for _ in range(2)], pool, 65536, fence=lambda: None)
    driver.fail("map", 2, False)
    outcome = store.apply(PageDelta(map=(PageRef(0, 0), PageRef(1, 0))), keep_free=0)
    assert not outcome.mapped
    assert (driver.usage()["mapped"], pool.free_handles, outcome.stuck) == (0, 2, ())


def test_a_half_made_delta_is_undone():
    check_that_a_half_made_delta_is_undone()


def test_a_store_that_forgets_to_undo_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(VirtualKvStore, "mapped_of", lambda self, pages: [])
    with pytest.raises(AssertionError):
        check_that_a_half_made_delta_is_undone()
