"""The engine's state in numbers: what /vmm, /metrics and LLM.memory() show.

Reads the cache manager and the scheduler; changes neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import asdict, astuple, replace

from xllm_cli.cache.manager import CacheManager
from xllm_cli.core import Counters, ModelActivity, Snapshot, VmmReport
from xllm_cli.engine.scheduler import Scheduler
from xllm_cli.neighbours.peers import PeerCounters
from xllm_cli.worker.sharing import WeightsShare


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What does not change while the engine runs. `driver` and `mode` are empty where nothing lives in pages."""

    model_id: str
    device: str
    driver: str
    mode: str
    page_bytes: int
    arena_bytes: int
    has_virtual_kv: bool = True


def together(
    snapshots: dict[str, Snapshot], *, latest: str, weights: int, parked: int, apart: int, has_newcomer: bool
) -> Snapshot:
    """The snapshots of a pool's models, by name, as one. `latest` saw the device last; `weights` and `parked` are the
    pool's bytes of all weights, those that are shared counted once; `apart` are the bytes of the others' KV that lies
    in no page of the pool. With a newcomer, what is nobody else's of the pool are weights that it reads."""
    reports = [snapshot.memory for snapshot in snapshots.values()]
    first, seen = reports[0], snapshots[latest].memory
    bands = {band: sum(getattr(report, band) for report in reports) for band in _SUMMED}
    kv = sum(report.mapped - report.weights for report in reports)
    physical = seen.physical + apart
    if has_newcomer:
        weights = max(weights, physical - seen.free_handles - parked - kv)
    totals = add_counters(*(snapshot.counters for snapshot in snapshots.values()))
    ill = next((snapshot for snapshot in snapshots.values() if not snapshot.healthy), None)
    stuck = max(snapshots.values(), key=lambda snapshot: snapshot.waiting_bytes)
    waits = next((snapshot for snapshot in snapshots.values() if snapshot.waiting_for), stuck)
    memory = replace(
        first,
        **bands,
        **{kind: getattr(seen, kind) for kind in _SEEN},
        physical=physical,
        ranks=[{**rank, "physical": physical} for rank in seen.ranks],
        mapped=kv + weights,
        weights=weights,
        parked=parked,
        execution_room=max(report.execution_room for report in reports),
        execution_peak=max(report.execution_peak for report in reports),
        models={name: facts for report in reports for name, facts in report.models.items()},
    )
    return Snapshot(
        memory=memory,
        counters=totals,
        num_running=sum(each.num_running for each in snapshots.values()),
        num_waiting=sum(each.num_waiting for each in snapshots.values()),
        waiting_for=(stuck if stuck.waiting_bytes else waits).waiting_for,
        waiting_bytes=stuck.waiting_bytes,
        healthy=ill is None,
        reason="" if ill is None else ill.reason,
        models={name: activity for each in snapshots.values() for name, activity in each.models.items()},
    )


def add_counters(*counters: Counters) -> Counters:
    """The totals of all."""
    return Counters(**{name: sum(getattr(each, name) for each in counters) for name in Counters.__struct_fields__})


def with_former(snapshot: Snapshot, former: Counters) -> Snapshot:
    """A snapshot that counts, too, what models that are gone had counted."""
    counters = add_counters(snapshot.counters, former)
    return replace(snapshot, counters=counters, memory=replace(snapshot.memory, **_totals(counters)))


def _totals(counters: Counters) -> dict[str, int]:
    """As a VmmReport has them."""
    return {
        "pages_mapped_total": counters.pages_mapped,
        "pages_unmapped_total": counters.pages_unmapped,
        "map_failures_total": counters.map_failures,
        "evicted_blocks_total": counters.evicted_blocks,
        "preemptions_total": counters.preemptions,
    }


_USES_WEIGHTS = ("awake", "falling asleep")
_SUMMED = (
    "kv_live", "kv_cached", "kv_idle", "kv_spare", "state", "pages_mapped_total", "pages_unmapped_total",
    "map_failures_total", "evicted_blocks_total", "preemptions_total",
)  # fmt: skip
_SEEN = ("total", "free", "free_handles", "anon")


class Reporter:
    """Makes a Snapshot after every step: constant work, whatever the cache holds."""

    def __init__(self, cache: CacheManager, facts: MemoryFacts, weights: WeightsShare | None = None) -> None:
        """`weights`: the model's, where they live in pages."""
        self._cache = cache
        self._facts = facts
        self.weights = weights
        self._before = Counters()
        self.peers = PeerCounters()

    def start_counting(self, scheduler: Scheduler) -> None:
        """Counters are zero from here on: what the start-up did is nobody's traffic."""
        self._before = Counters()
        self._before = self._counters(scheduler)

    def snapshot(self, scheduler: Scheduler, model_state: str = "awake", *, is_paused: bool = False) -> Snapshot:
        """Everything the outside may ask, as of now."""
        counters = self._counters(scheduler)
        activity = ModelActivity(
            counters=counters,
            state=model_state,
            is_paused=is_paused,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            waiting_for=scheduler.waiting_for,
            waiting_bytes=scheduler.short_bytes if scheduler.waiting_for == "memory" else 0,
        )
        return Snapshot(
            memory=self._memory(counters, model_state),
            counters=counters,
            num_running=activity.num_running,
            num_waiting=activity.num_waiting,
            waiting_for=activity.waiting_for,
            waiting_bytes=activity.waiting_bytes,
            models={self._facts.model_id: activity},
            healthy=self._cache.is_healthy,
            reason="" if self._cache.is_healthy else "a page stays mapped after three unmaps",
        )

    def _counters(self, scheduler: Scheduler) -> Counters:
        totals, cache = scheduler.totals, self._cache.counters
        now = Counters(
            steps=totals.steps,
            prompt_tokens_computed=totals.prompt_tokens,
            generation_tokens=totals.generated_tokens,
            prefix_cache_queries=totals.prefix_queries,
            prefix_cache_hits=totals.prefix_hits,
            preemptions=totals.preemptions,
            exhausted_steps=totals.exhausted_steps,
            prefill_chunks=totals.prefill_chunks,
            evicted_blocks=cache.evicted_blocks,
            pages_mapped=cache.pages_mapped,
            pages_unmapped=cache.pages_unmapped,
            map_failures=cache.map_failures,
        )
        since = zip(Counters.__struct_fields__, astuple(now), astuple(self._before), strict=True)
        return Counters(**{name: after - before for name, after, before in since})

    def _memory(self, counters: Counters, model_state: str) -> VmmReport:
        cache, facts, seen = self._cache, self._facts, self._cache.observations[0]
        bands, headroom = cache.bands(), cache.headroom()
        # a physical cache has no handles: it holds exactly what it was given at the start
        physical = seen.owned + (0 if facts.has_virtual_kv else bands["mapped"])
        weights, parked = 0, 0
        if self.weights is not None:
            weights, parked = self.weights.mapped_bytes, self.weights.parked_bytes
        bands["mapped"] += weights
        return VmmReport(
            device=facts.device,
            driver=facts.driver,
            mode=facts.mode,
            page_bytes=facts.page_bytes,
            total=seen.total,
            free=seen.free,
            arena=facts.arena_bytes,
            physical=physical,
            free_handles=seen.free_handles,
            anon=seen.anon,
            execution_room=seen.execution_room,
            execution_peak=seen.execution_peak,
            floor=cache.floor(),
            reserve=cache.limits.reserve,
            limit=cache.limits.limit,
            headroom=headroom.bytes,
            headroom_limited_by=headroom.limited_by,
            headroom_explained=cache.explain_headroom(),
            budget={name: least for least, name in sorted(headroom.terms, reverse=True)},
            possible=cache.possible_bytes(),
            possible_limited_by=cache.possible_limited_by(),
            ranks=[
                {
                    "rank": 0,
                    "total": seen.total,
                    "free": seen.free,
                    "free_before": seen.free_before,
                    "tensors": seen.tensors,
                    "reserved": seen.reserved,
                    "physical": physical,
                    "unaccounted": seen.allocated - seen.owned,
                }
            ],
            weights=weights,
            parked=parked,
            models={
                facts.model_id: {
                    "state": model_state,
                    "kv_mapped": bands["mapped"] - weights,
                    "kv_live": bands["kv_live"],
                    "bytes_per_block": cache.spec.bytes_per_block,
                    "weights": weights if model_state in _USES_WEIGHTS else 0,  # else only others need them
                    "parked": parked if model_state == "parked" else 0,
                    **({} if cache.limits.own_limit is None else {"limit": cache.limits.own_limit}),
                }
            },
            neighbours=asdict(self.peers),
            tensors=[{"name": t.name, "bytes_per_block": t.bytes_per_block} for t in cache.spec.tensors],
            **_totals(counters),
            **bands,
        )
