"""Random operations on a CacheManager, with an oracle of what every block's memory holds.

Owns sequences and the model of the memory; the pages are the caller's: `apply(delta)` executes one delta on all ranks
and returns (mapped, stuck) as StepResult does, `observe()` what the rank sees afterwards. FakeRanks is the simplest
such caller; real pages may take its place.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from xllm_cli.cache.blocks import BlockTable
from xllm_cli.cache.budget import Limits
from xllm_cli.cache.manager import CacheManager
from xllm_cli.cache.options import CacheOptions
from xllm_cli.core import CacheSpec, Observation, PageDelta, PageRef, TensorSpec

Apply = Callable[[PageDelta], tuple[bool, Sequence[PageRef]]]
VOCABULARY = 3
"""So few tokens that sequences share prefixes by chance."""


def spec_of(*widths: int, block_size: int = 4) -> CacheSpec:
    """A CacheSpec with one tensor per width, in bytes per block."""
    return CacheSpec(block_size=block_size, tensors=tuple(TensorSpec(f"t{i}", w) for i, w in enumerate(widths)))


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeRanks:
    """Pages as a set. `refuse` and `stick` are the odds that a delta's maps are refused, and that an unmap fails."""

    def __init__(self, page_bytes: int, *, total: int = 1 << 20, rng: random.Random | None = None) -> None:
        self.page_bytes, self.total = page_bytes, total
        self.mapped: set[PageRef] = set()
        self.taken_by_others = 0
        self.refuse = self.stick = 0.0
        self.calls = 0
        self._rng = rng or random.Random(0)

    def apply(self, delta: PageDelta) -> tuple[bool, Sequence[PageRef]]:
        self.calls += len(delta.map) + len(delta.unmap)
        stuck = [ref for ref in delta.unmap if self._rng.random() < self.stick]
        assert self.mapped.issuperset(delta.unmap) and self.mapped.isdisjoint(delta.map)
        self.mapped -= set(delta.unmap) - set(stuck)
        if delta.map and self._rng.random() < self.refuse:
            return False, stuck
        self.mapped |= set(delta.map)
        return True, stuck

    def observe(self) -> Observation:
        owned = len(self.mapped) * self.page_bytes
        return Observation(total=self.total, free=self.total - owned - self.taken_by_others, owned=owned)


def make_cache(
    spec: CacheSpec,
    *,
    pages: int = 64,
    page_bytes: int | None = 64,
    limits: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> CacheManager:
    """An elastic cache without a host floor whose arena is `pages` pages of 64 or `page_bytes` bytes."""
    caps = Limits(**{"arena_bytes": pages * (page_bytes or 64), "host": False, **(limits or {})})
    arguments = {"prefix_seed": 1024, **arguments}
    return CacheManager(spec, limits=caps, page_bytes=page_bytes, options=CacheOptions(**(options or {})), **arguments)


def run_delta(cache: CacheManager, ranks: FakeRanks, now: float = 0.0) -> PageDelta:
    """Close a plan and let the ranks do it."""
    delta = cache.plan_delta(now)
    mapped, stuck = ranks.apply(delta)
    (cache.acknowledge if mapped else cache.refuse)(delta, stuck)
    cache.observe(ranks.observe())
    return delta


@dataclass(eq=False)
class Session:
    """One sequence: `computed` tokens have their KV written."""

    table: BlockTable
    tokens: list[int]
    computed: int = 0
    held: list[int] = field(default_factory=list)


class CacheOps:
    """Random operations; `step()` does one and walks every invariant."""

    def __init__(
        self, cache: CacheManager, apply: Apply, observe: Callable[[], Observation], *, clock: Clock, rng: random.Random
    ) -> None:
        self.cache, self.clock, self.rng = cache, clock, rng
        self.sessions: list[Session] = []
        self.done: dict[str, int] = {}
        self._apply, self._observe = apply, observe
        self._holds: list[int] = []
        self._memory: dict[int, tuple[object, ...]] = {}
        self._mapped: set[PageRef] = set()
        self._generation = 0
        self._settled = True
        cache.observe(observe())
        self._choices = {
            self.plan: 40,
            self.arrive: 20,
            self.finish: 12,
            self.preempt: 5,
            self.wait: 5,
            self.hold: 4,
            self.drop: 4,
            self.limit: 3,
            self.reclaim: 2,
            self.close: 2,
            self.forget: 1,
        }

    def step(self) -> None:
        """One random operation, then every check."""
        (operation,) = self.rng.choices(list(self._choices), list(self._choices.values()))
        operation()
        self.done[operation.__name__] = self.done.get(operation.__name__, 0) + 1
        self.cache.check()

    # --- operations -------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """A newcomer is matched and admitted if its prompt and one block fit."""
        tokens = [self.rng.randrange(VOCABULARY) for _ in range(self.rng.choice((1, 4, 9, 17, 40)))]
        if self.sessions and self.rng.random() < 0.5:
            tokens = self.rng.choice(self.sessions).tokens[:] + tokens[:3]
        session = Session(self.cache.open(salt=self.rng.choice(("", "salt"))), tokens)
        self._admit(session)

    def _admit(self, session: Session) -> None:
        cache, table = self.cache, session.table
        session.computed = cache.match(table, session.tokens)
        assert session.computed % cache.block_size == 0 and session.computed < len(session.tokens)
        self._check_memory(session)
        missing = cache.blocks_for(len(session.tokens)) - len(table.blocks)
        before, fits = list(table.blocks), cache.fits(missing, table)
        grown = cache.grow(table, len(session.tokens))
        assert grown == fits, f"fits said {fits}, grow {grown}"
        if grown:
            self.sessions.append(session)
        else:
            assert table.blocks == before
            cache.release(table)

    def plan(self) -> None:
        """A step over some sequences: new tokens, a delta, then commit or rollback."""
        rows = [s for s in self.sessions if self.rng.random() < 0.7]
        before = {session: (len(session.table.blocks), session.computed) for session in rows}
        rows = [session for session in rows if self._extend(session)]
        self._maintain(rows, before)

    def _extend(self, session: Session) -> bool:
        if session.computed == len(session.tokens):
            session.tokens.append(self.rng.randrange(VOCABULARY))
        chunk = min(self.rng.choice((1, 8, 64)), len(session.tokens) - session.computed)
        if not self.cache.grow(session.table, session.computed + chunk):
            return False
        session.computed += chunk
        if self.rng.random() < 0.3:
            self.cache.publish(session.table, session.tokens, session.computed, provisional=True)
        return True

    def _maintain(self, rows: list[Session], before: dict[Session, tuple[int, int]]) -> None:
        cache = self.cache
        steady = self._settled and self._observe() == cache.observations[0] and not cache.over_limit_bytes()
        seen = cache.observations[0]
        free = seen.free_handles + (max(0, seen.free - cache.keep_free()) if cache.limits.elastic else 0)
        delta = cache.plan_delta(self.clock.now)
        mapped, stuck = self._apply(delta)
        self._remember(delta, mapped, stuck)
        if mapped:
            cache.acknowledge(delta, stuck)
            if steady and not stuck:
                self._check_caps((len(delta.map) - len(delta.unmap)) * cache.page_bytes, free)
            for session in rows:
                self._write(session, before[session][1])
                cache.publish(session.table, session.tokens, session.computed)
        else:
            cache.withdraw()
            for session in rows:
                blocks, session.computed = before[session]
                cache.shrink(session.table, blocks)
            cache.refuse(delta, stuck)
        assert cache.page_bytes == 1 or cache.bands()["mapped"] == len(self._mapped) * cache.page_bytes
        cache.observe(self._observe())
        self._settled = mapped
        self.clock.now += 0.004

    def finish(self) -> None:
        """A sequence ends and is released, twice at times."""
        if self.sessions:
            session = self.sessions.pop(self.rng.randrange(len(self.sessions)))
            self.cache.release(session.table)
            if self.rng.random() < 0.1:
                self.cache.release(session.table)

    def preempt(self) -> None:
        """The youngest gives its blocks back and is admitted again at once if it fits."""
        if self.sessions:
            session = self.sessions.pop()
            self.cache.release(session.table)
            self._admit(session)

    def wait(self) -> None:
        """Time passes, and a maintenance step."""
        self.clock.now += self.rng.choice((0.004, 0.3, 1.5))
        self._maintain([], {})

    def hold(self) -> None:
        """A transfer takes a reference on a sequence's blocks."""
        if self.sessions:
            self._holds.append(self.cache.hold(self.rng.choice(self.sessions).table.blocks))

    def drop(self) -> None:
        """A transfer ends."""
        if self._holds:
            self.cache.drop(self._holds.pop(self.rng.randrange(len(self._holds))))

    def limit(self) -> None:
        """The byte limit moves; whoever is above it gives way."""
        most = self.cache.possible_bytes()
        self.cache.set_limit(self.rng.choice((None, None, most // 4, most // 2, most)))
        while self.cache.over_limit_bytes() and self.sessions:
            self.cache.release(self.sessions.pop().table)

    def reclaim(self) -> None:
        """A peer asks for bytes."""
        leaving = self.cache.forget_bytes(self.rng.choice((1, 500, 5000)))
        assert leaving <= self.cache.bands()["mapped"]

    def close(self) -> None:
        """Growth is closed for a while."""
        self.cache.close_growth(self.clock.now + 0.01)

    def forget(self) -> None:
        """Everything computed before is forgotten, as a weight update does."""
        self.cache.forget_all()
        self._generation += 1
        assert self.cache.bands()["kv_cached"] == 0

    def drain(self) -> None:
        """End everything."""
        while self._holds:
            self.drop()
        while self.sessions:
            self.finish()

    # --- the oracle -------------------------------------------------------------------------------------------------

    def _content(self, session: Session, block: int) -> tuple[object, ...]:
        end = (block + 1) * self.cache.block_size
        return (session.table.salt, *session.tokens[:end])

    def _write(self, session: Session, start: int) -> None:
        """The step wrote KV from `start` to `computed`, all of it on mapped pages: remember what full blocks hold."""
        size = self.cache.block_size
        for block in session.table.blocks:
            assert self._mapped.issuperset(self._pages_of(block)), f"a row uses block {block}, which is not all mapped"
        for block in range(start // size, session.computed // size):
            self.store(session.table.blocks[block], (self._generation, *self._content(session, block)))

    def store(self, block: int, content: tuple[object, ...]) -> None:
        """The KV of a block is written; all its pages are mapped."""
        self._memory[block] = content

    def holds(self, block: int, content: tuple[object, ...]) -> bool:
        """Whether a block still holds what was stored there."""
        return self._memory.get(block) == content

    def _pages_of(self, block: int) -> Iterator[PageRef]:
        if self.cache.page_bytes > 1:
            for tensor, spec in enumerate(self.cache.spec.tensors):
                width, size = spec.bytes_per_block, self.cache.page_bytes
                for page in range(block * width // size, ((block + 1) * width - 1) // size + 1):
                    yield PageRef(tensor, page)

    def _remember(self, delta: PageDelta, mapped: bool, stuck: Sequence[PageRef]) -> None:
        """Mirror what the ranks did; what lay on a page that went is gone."""
        self._mapped -= set(delta.unmap) - set(stuck)
        self._mapped |= set(delta.map) if mapped else set(delta.map) & set(stuck)
        size = self.cache.page_bytes
        for source, target in delta.copies if mapped else ():
            self._copy(source, target)
        for tensor, page in delta.unmap:
            width = self.cache.spec.tensors[tensor].bytes_per_block
            for block in range(page * size // width, -(-(page + 1) * size // width)):
                self._memory.pop(block, None)

    def _copy(self, source: int, target: int) -> None:
        """A block's KV was copied; both lie on mapped pages."""
        assert self._mapped.issuperset([*self._pages_of(source), *self._pages_of(target)]), f"{source} → {target}"
        self._memory[target] = self._memory[source]

    def _check_caps(self, growth: int, free: int) -> None:
        """A delta that grows stays below every cap and leaves free what must stay free."""
        if growth > 0:
            caps, mapped = self.cache.limits, self.cache.bands()["mapped"]
            assert mapped <= min(caps.arena_bytes, caps.max_cache_size or mapped, caps.limit or mapped)
            assert growth <= free, f"growth by {growth} with {free} to spare"

    def _check_memory(self, session: Session) -> None:
        """Every block that was hit holds the KV of exactly these tokens, computed since the last forget."""
        for index, block in enumerate(session.table.blocks[: session.computed // self.cache.block_size]):
            wanted = (self._generation, *self._content(session, index))
            assert self.holds(block, wanted), f"block {block} was hit for {wanted} and holds something else"
