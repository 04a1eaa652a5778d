"""The cases of `xllm bench vmm`: each yields rows, with the floor of the same machine measured beside it.

A case is a function of `quick`; put a further one into CASES. Times are medians of single calls, in this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

from xllm_cli.bench.churn import measure_churn
from xllm_cli.bench.reaction import measure_peers, measure_reaction
from xllm_cli.bench.rows import Row
from xllm_cli.bench.vmm_rig import BLOCK_SIZE, BarePages, Rig, p50, rig
from xllm_cli.cache.blocks import BlockTable
from xllm_cli.engine.report import MemoryFacts, Reporter
from xllm_cli.engine.scheduler import Scheduler, StepLimits

WIDTH = 360 << 10
"""Bytes of 16 tokens of a model of 135 million parameters in bfloat16."""

Case = Callable[[bool], Iterator[Row]]


def blocks(quick: bool) -> Iterator[Row]:
    """Taking blocks and giving them back where their pages are mapped."""
    times = 200 if quick else 3000
    for name, width, count, bar in (
        ("alloc(1) + free(1), across a page", 2 << 20, 1, 20.0),
        ("alloc(1024) + free(1024)", WIDTH, 1024, 40.0),
        ("alloc(1024) + free(1024), 64 KiB blocks", 64 << 10, 1024, 40.0),
    ):
        with rig(width=width, arena_pages=2048, device_pages=2048, spare_pages=2048) as on:
            on.cache.release(on.table(count))
            table, ids = on.cache.open(), list(range(count))

            def ours(on: Rig = on, table: BlockTable = table, count: int = count) -> None:
                on.cache.grow(table, count * BLOCK_SIZE)
                on.cache.release(table)

            def floor(ids: list[int] = ids, count: int = count) -> None:
                taken = ids[:count]
                del ids[:count]
                ids += taken

            repeats = times if count == 1 else times // 10
            yield Row("blocks", name, p50(ours, repeats), "us", p50(floor, repeats), "Python list", bar)


def cold(quick: bool) -> Iterator[Row]:
    """A block whose page must be mapped, and one whose page leaves: what the sequence waits for, and what the step does
    for all pages together. Handles are pooled, as within a step."""
    times = 100 if quick else 1000
    with closing(BarePages(1)) as bare:
        bare.create(0)
        raw_unmap = p50(lambda: bare.unmap(0), times)
        raw_map = p50(lambda: bare.remap(0), times) - raw_unmap
    with rig(width=2 << 20, arena_pages=256, device_pages=256, spare_pages=0) as on:
        warm, cold_alloc, free, leave = [], [], [], []
        on.pool.give(on.pool.take(4) or [])
        for _ in range(times):
            begin = time.perf_counter_ns()
            on.step(trim=False)
            warm.append(time.perf_counter_ns() - begin)
            table = on.cache.open()
            begin = time.perf_counter_ns()
            on.cache.grow(table, BLOCK_SIZE)
            on.step(trim=False)
            cold_alloc.append(time.perf_counter_ns() - begin)
            begin = time.perf_counter_ns()
            on.cache.release(table)
            free.append(time.perf_counter_ns() - begin)
            begin = time.perf_counter_ns()
            on.step(trim=False)
            leave.append(time.perf_counter_ns() - begin)
    step, alloc, gone = (sorted(taken)[times // 2] / 1000 for taken in (warm, cold_alloc, leave))
    given = sorted(free)[times // 2] / 1000
    yield Row("cold", "alloc(1) on a fresh page, more than a step without", alloc - step, "us", raw_map, "mmap", 15.0)
    yield Row("cold", "free(1) of a page's last block", given, "us", None, "", 5.0)
    yield Row("cold", "the page leaves with the next step", gone - step, "us", raw_unmap, "mmap")
    yield Row("cold", "a step without page changes", step, "us")


def swing(quick: bool) -> Iterator[Row]:
    """The working set swings by a quarter, a hundred times; only the first round may call the driver."""
    rounds = 20 if quick else 100
    with rig(width=WIDTH, arena_pages=512, device_pages=512, spare_pages=64) as on:
        base = on.table(300)
        on.cache.release(on.table(100))
        calls, queries, allocs = on.driver.calls, on.driver.queries, 0
        for _ in range(rounds):
            table = on.cache.open()
            for tokens in range(BLOCK_SIZE, 100 * BLOCK_SIZE + 1, BLOCK_SIZE):
                on.cache.grow(table, tokens)
                allocs += 1
            on.step()
            on.cache.release(table)
        yield Row("swing", "driver calls per alloc", (on.driver.calls - calls) / allocs, "", None, "", 0.0)
        asked = 1000 * (on.driver.queries - queries) / allocs
        yield Row("swing", "questions for free memory per 1000 allocs", asked, "", None, "", 0.0)
        on.cache.release(base)


def growth(quick: bool) -> Iterator[Row]:
    """Fresh pages for one request, and all of them back: calls for a run of pages, and time for each page."""
    pages = 16 if quick else 128
    with closing(BarePages(pages)) as bare:
        begin = time.perf_counter()
        for page in range(pages):
            bare.create(page)
            bare.map(page)
        created = (time.perf_counter() - begin) / pages * 1e6
        bare.unmap(0, pages)
        begin = time.perf_counter()
        bare.destroy(0, pages)
        destroyed = (time.perf_counter() - begin) / pages * 1e6
    with rig(width=2 << 20, arena_pages=pages, device_pages=pages, spare_pages=0) as on:
        calls = on.driver.calls
        begin = time.perf_counter()
        table = on.table(pages)
        taken = (time.perf_counter() - begin) / pages * 1e6
        yield Row("growth", "a fresh page of a run", taken, "us", created, "touch, collapse, mmap")
        yield Row("growth", f"driver calls to grow by {pages} pages", on.driver.calls - calls, "", None, "", 2)
        on.cache.release(table)
        calls, begin = on.driver.calls, time.perf_counter()
        on.step()
        taken = (time.perf_counter() - begin) / pages * 1e6
        yield Row("growth", "a page given back to the system", taken, "us", destroyed, "fallocate")
        yield Row("growth", f"driver calls to shrink by {pages} pages", on.driver.calls - calls, "", None, "", 2)


def reserve(quick: bool) -> Iterator[Row]:
    """Addresses for a terabyte."""
    with rig(width=WIDTH, arena_pages=1, device_pages=1) as on:
        before = on.driver.usage()["vmas"]
        begin = time.perf_counter()
        address = on.driver.reserve(1 << 40)
        taken = (time.perf_counter() - begin) * 1000
        yield Row("reserve", "1 TiB of addresses", taken, "ms", None, "", 1.0)
        yield Row("reserve", "kernel mappings for it", on.driver.usage()["vmas"] - before, "", None, "", 64)
        on.driver.release(address, 1 << 40)


def limit(quick: bool) -> Iterator[Row]:
    """An idle cache full of prefixes is told to halve: until it is below, and how fast bytes go. One second after its
    last prefix is forgotten it owns nothing."""
    pages = 32 if quick else 256
    with closing(BarePages(pages)) as bare:
        for page in range(pages):
            bare.create(page)
        begin = time.perf_counter()
        bare.destroy(0, pages)
        floor = pages * 2 / 1024 / (time.perf_counter() - begin)
    with rig(width=WIDTH, arena_pages=pages, device_pages=pages) as on:
        _fill(on, pages * (2 << 20) // WIDTH)
        before = on.store.owned_bytes
        begin = time.perf_counter()
        on.cache.set_limit(before // 2)
        while on.store.owned_bytes > before // 2:
            on.step()
        taken = time.perf_counter() - begin
        gone = (before - on.store.owned_bytes) / (1 << 30)
        yield Row("limit", f"{before >> 20} MiB halved", taken * 1000, "ms")
        yield Row("limit", "speed of giving back", gone / taken, "GiB/s", floor, "fallocate")
        on.cache.forget_all()
        begin = time.perf_counter()
        on.rest()
        yield Row("limit", "idle until nothing is owned", time.perf_counter() - begin, "s", None, "", 1.1)
        yield Row("limit", "bytes owned then", on.store.owned_bytes, "B", None, "", 0)


def exhaustion(quick: bool) -> Iterator[Row]:
    """More is wanted than there is, again and again."""
    with rig(width=WIDTH, arena_pages=64, device_pages=16) as on:
        tables = [on.cache.open() for _ in range(64)]
        refused = 0
        for table in tables:
            refused += not on.cache.grow(table, 4 * BLOCK_SIZE)
            on.step()
        yield Row("exhaustion", "requests refused of 64", refused, "")
        again = p50(lambda: on.cache.grow(tables[-1], 4 * BLOCK_SIZE), 50 if quick else 500)
        yield Row("exhaustion", "to refuse one", again, "us")
        on.cache.check()


def snapshot(quick: bool) -> Iterator[Row]:
    """What a step pays so that /vmm and /metrics can be read; a single alloc or free publishes nothing."""
    with rig(width=WIDTH, arena_pages=64, device_pages=64) as on:
        _fill(on, 100)
        scheduler = Scheduler(on.cache, StepLimits(tokens=512, sequences=8, chunk=None, prefill=None))
        facts = MemoryFacts(
            model_id="bench", device="cpu", driver="host", mode="huge", page_bytes=on.page_bytes, arena_bytes=on.total
        )
        reporter = Reporter(on.cache, facts)
        taken = p50(lambda: reporter.snapshot(scheduler), 100 if quick else 1000)
        yield Row("snapshot", "usage, per step", taken, "us")


def churn(quick: bool) -> Iterator[Row]:
    """Conversations that decode side by side, then rest: what lies idle, what is given back, what it costs in hits."""
    for found in measure_churn(requests=120 if quick else 600):
        yield Row("churn", found.name, found.value, found.unit, found.floor, found.floor_is, found.bar)


def peers(quick: bool) -> Iterator[Row]:
    """What `xllm vmm` and an engine in need pay to see all engines of a device, and when one that has died is gone."""
    yield from measure_peers(times=50 if quick else 500)


def reaction(quick: bool) -> Iterator[Row]:
    """A server at rest is asked for 64 MiB, by a neighbour and by a limit."""
    yield from measure_reaction(repeats=1 if quick else 7)


CASES: dict[str, Case] = {
    "blocks": blocks,
    "cold": cold,
    "swing": swing,
    "growth": growth,
    "reserve": reserve,
    "limit": limit,
    "exhaustion": exhaustion,
    "snapshot": snapshot,
    "churn": churn,
    "peers": peers,
    "reaction": reaction,
}


def _fill(on: Rig, count: int) -> None:
    """Cache so many blocks in chains of eight."""
    for number in range(count // 8):
        tokens = [number] * (8 * BLOCK_SIZE + 1)
        table = on.cache.open()
        if not on.cache.grow(table, 8 * BLOCK_SIZE):
            return
        on.step()
        on.cache.publish(table, tokens, 8 * BLOCK_SIZE)
        on.cache.release(table)
