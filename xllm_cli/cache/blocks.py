"""Who holds a block: free, held or cached, how often, and which block comes next.

Owns block ids and references. It asks Residency what a block costs and tells it which blocks live; it knows neither
tokens nor the budget. Ids are activated on demand, so that an arena of a terabyte costs nothing until it is used.

    free + held + cached + padding = activated        each activated block is exactly one of these
    held:   references > 0                            cached: no reference, but findable in the prefix index
    free:   ready (all its pages are present, taking it costs nothing) or cold (some page is absent)
A block not activated yet is cold: its pages are absent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xllm_cli.cache.pages import Run, runs_of
from xllm_cli.cache.placement import Placement
from xllm_cli.cache.prefix import BlockKey, Entry
from xllm_cli.cache.residency import Residency, Spare
from xllm_cli.core import MediaSpan

COLD, READY, HELD, CACHED, PADDING = range(5)
_COLD, _READY, _HELD, _CACHED = (bytes([state]) for state in (COLD, READY, HELD, CACHED))


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks: block i holds the KV of positions `[i * block_size, (i + 1) * block_size)`.

    `chain[i]` is the index entry of the prefix that ends with block i (its block may be another's equal one); it covers
    the first `num_published` blocks. `keys` are the hashes of full blocks, computed once; they outlive `blocks`.
    `cached_tokens` is what the last match from an empty table found. `epoch` tells blocks older than a forget_all.
    """

    salt: str = ""
    media: tuple[MediaSpan, ...] = ()
    blocks: list[int] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    chain: list[Entry] = field(default_factory=list)
    cached_tokens: int = 0
    epoch: int = 0
    queried_tokens: int = 0

    @property
    def num_published(self) -> int:
        """Full blocks, from the first on, whose prefix is in the index."""
        return len(self.chain)


class Cold(NamedTuple):
    """Cold blocks that could be taken: `num_blocks` of them in `runs`."""

    runs: list[Run]
    num_blocks: int


class BlockPool:
    """All blocks of one cache. `num_blocks` ids at most; block 0 is padding if asked for, live for ever."""

    def __init__(self, residency: Residency, *, num_blocks: int, padding: bool = False) -> None:
        self.num_blocks = num_blocks
        self.num_ready = self.num_held = self.num_cached = 0
        self.references: list[int] = []
        self.placement = Placement(residency.geometry)
        self._states = bytearray()
        self._residency = residency
        self._cold_from = 0
        self._padding = padding
        if padding:
            self._activate(1)
            self._states[0] = PADDING
            self.references[0] = 1
            residency.retain(0, 1)
            self.settle()

    @property
    def first_block(self) -> int:
        """The lowest id that may be taken."""
        return int(self._padding)

    @property
    def padding_runs(self) -> list[Run]:
        """The padding block, if there is one."""
        return [(0, 1)] if self._padding else []

    @property
    def activated(self) -> int:
        """Ids in use so far: `[0, activated)`."""
        return len(self._states)

    def state(self, block: int) -> int:
        """COLD, READY, HELD, CACHED or PADDING."""
        return self._states[block] if block < len(self._states) else COLD

    # --- taking -----------------------------------------------------------------------------------------------------

    def take_ready(self, count: int) -> list[int]:
        """Hold `count` ready blocks, those on the fullest pages first. There must be as many."""
        taken: list[int] = []
        placement, states = self.placement, self._states
        self.num_ready -= count
        self.num_held += count
        while count:
            group = placement.fullest()
            wanted = min(count, placement.ready[group])
            count -= wanted
            placement.change(group, wanted, 0, -wanted)
            start, end = self._blocks_of(group)
            while wanted:
                start = states.find(READY, start, end)
                stop = self._end_of_run(start, min(end, start + wanted), _READY) if wanted > 1 else start + 1
                self._hold(start, stop)
                taken.extend(range(start, stop))
                wanted -= stop - start
                start = stop
        return taken

    def cold(self, count: int, pages: int, gone: Collection[Spare] = ()) -> Cold:
        """Up to `count` cold blocks, lowest ids first, that cost at most `pages` more pages. Takes nothing."""
        opening = self._residency.opening(gone)
        runs: list[Run] = []
        found = spent = 0
        block = self._cold_from = self._next_cold(self._cold_from)
        while found < count and block < self.num_blocks:
            cost = opening.cost(block)
            if spent + cost > pages:
                break
            spent += cost
            free_until = min(opening.accept(block), block + count - found, self.num_blocks)
            stop = self._end_of_cold(block + 1, free_until)
            if runs and runs[-1][1] == block:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((block, stop))
            found += stop - block
            block = self._next_cold(stop)
        return Cold(runs, found)

    def take_run(self, run: Run) -> None:
        """Hold the blocks of a run, all cold or all ready; call settle() afterwards."""
        start, stop = run
        self._activate(stop)
        was_ready = self._states[start] == READY
        self.num_held += stop - start
        if was_ready:
            self.num_ready -= stop - start
        for group, count in self._groups(run):
            self.placement.change(group, count, 0, -count if was_ready else 0)
        self._hold(start, stop)

    def _hold(self, start: int, stop: int) -> None:
        if stop - start == 1:
            self._states[start] = HELD
            self.references[start] = 1
        else:
            self._states[start:stop] = _HELD * (stop - start)
            self.references[start:stop] = [1] * (stop - start)
        self._residency.retain(start, stop)

    def take(self, blocks: Sequence[int]) -> None:
        """Hold exactly these free blocks, ascending."""
        for start, stop in runs_of(blocks):
            self._activate(stop)
            while start < stop:
                end = self._end_of_run(start, stop, _READY if self._states[start] == READY else _COLD)
                self.take_run((start, end))
                start = end
        self.settle()

    def reuse(self, blocks: Iterable[int]) -> None:
        """Hold blocks that are cached and just left the index."""
        for block in blocks:
            self._hold_cached(block)

    def retain(self, block: int) -> None:
        """One more reference on a held or cached block."""
        if self.references[block]:
            self.references[block] += 1
        else:
            self._hold_cached(block)

    def _hold_cached(self, block: int) -> None:
        assert self._states[block] == CACHED, f"block {block} is neither held nor cached"
        self._states[block] = HELD
        self.references[block] = 1
        self.num_cached -= 1
        self.num_held += 1
        self.placement.change(self.placement.geometry.group(block), 1, -1, 0)

    # --- giving back ------------------------------------------------------------------------------------------------

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Drop one reference on each; returns those that have none left, which must be freed or cached next."""
        references = self.references
        gone = []
        for block in blocks:
            count = references[block] - 1
            assert count >= 0, f"block {block} released once too often"
            references[block] = count
            if not count:
                gone.append(block)
        return gone

    def cache(self, blocks: Iterable[int]) -> None:
        """Blocks without references stay findable."""
        group_of = self.placement.geometry.group
        for block in blocks:
            self._states[block] = CACHED
            self.num_held -= 1
            self.num_cached += 1
            self.placement.change(group_of(block), -1, 1, 0)

    def free(self, blocks: Iterable[int]) -> None:
        """Blocks without references, all held or all cached before, become free."""
        for run in runs_of(blocks):
            start, stop = run
            was_held = self._states[start] == HELD
            self._states[start:stop] = _READY * (stop - start)
            self.num_ready += stop - start
            if was_held:
                self.num_held -= stop - start
            else:
                self.num_cached -= stop - start
            for group, count in self._groups(run):
                self.placement.change(group, -count if was_held else 0, 0 if was_held else -count, count)
            self._residency.release(start, stop)
        if self._residency.changed:
            self.settle()

    # --- ready or cold ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Sort the free blocks of pages that came or went into ready and cold, activating those of new pages."""
        changed = self._residency.changed
        while changed:
            start, stop, primary = changed.pop()
            if primary:
                self._activate(min(stop, self.num_blocks))
            stop = min(stop, len(self._states))
            if start < stop:
                self._sort((start, stop))

    def _sort(self, run: Run) -> None:
        start, stop = run
        before = bytes(self._states[start:stop])
        after = bytearray(before.replace(_READY, _COLD))
        for a, b in self._residency.present_runs(run):
            after[a - start : b - start] = after[a - start : b - start].replace(_COLD, _READY)
        if after == before:
            return
        self._states[start:stop] = after
        self._cold_from = min(self._cold_from, start)
        for group, _ in self._groups(run):
            change = self._states.count(READY, *self._blocks_of(group)) - self.placement.ready[group]
            if change:
                self.num_ready += change
                self.placement.change(group, 0, 0, change)

    def ready_in(self, run: Run) -> bool:
        """Whether any block of a run is ready."""
        return self._states.find(READY, *run) >= 0

    # --- whole pages ------------------------------------------------------------------------------------------------

    def page_use(self, block: int) -> int:
        """How many blocks use the page that a block begins on."""
        return self.placement.used[self.placement.geometry.group(block)]

    def is_page_held(self, group: int) -> bool:
        """Whether a held or padding block touches a group's page; it may begin on the page before."""
        start, end = self._blocks_of(group)
        before = max(0, start - 1)
        return any(self._states.find(state, before, end) >= 0 for state in (HELD, PADDING))

    def cached_in(self, group: int) -> list[int]:
        """The cached blocks of a group."""
        start, end = self._blocks_of(group)
        return [block for block in range(start, min(end, self.activated)) if self._states[block] == CACHED]

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _activate(self, stop: int) -> None:
        start = len(self._states)
        if stop > start:
            self._states.extend(_COLD * (stop - start))
            self.references.extend([0] * (stop - start))
            self.placement.reach(self.placement.geometry.group(stop - 1))

    def _blocks_of(self, group: int) -> Run:
        geometry = self.placement.geometry
        return geometry.start(group), geometry.start(group + 1)

    def _groups(self, run: Run) -> Iterator[tuple[int, int]]:
        """(group, blocks of the run in it)."""
        width, page = self.placement.geometry
        start, stop = run
        while start < stop:
            group = start * width // page
            end = min(stop, -(-(group + 1) * page // width))
            yield group, end - start
            start = end

    def _end_of_run(self, start: int, end: int, state: bytes) -> int:
        part = self._states[start:end]
        return start + len(part) - len(part.lstrip(state))

    def _next_cold(self, start: int) -> int:
        """The lowest cold block from `start` on; ids not activated yet are cold."""
        found = self._states.find(COLD, start) if start < len(self._states) else -1
        return found if found >= 0 else max(start, len(self._states))

    def _end_of_cold(self, start: int, end: int) -> int:
        stop = self._end_of_run(start, min(end, len(self._states)), _COLD)
        return stop if stop < len(self._states) else end

    def check(self) -> None:
        """Walk every block: exactly one state each, totals and order equal to a recount."""
        states = self._states
        counts = [states.count(state) for state in range(5)]
        assert sum(counts) == self.activated <= self.num_blocks, "a block in no state"
        assert counts[1:4] == [self.num_ready, self.num_held, self.num_cached], f"states {counts} differ from totals"
        assert counts[PADDING] == int(self._padding)
        for block, references in enumerate(self.references):
            assert (references > 0) == (states[block] in (HELD, PADDING)), f"block {block}: {references} references"
        totals = {state: [0] * len(self.placement.used) for state in (HELD, CACHED, READY)}
        for block, state in enumerate(states):
            if state in totals:
                totals[state][self.placement.geometry.group(block)] += 1
        self.placement.check(totals[HELD], totals[CACHED], totals[READY])
        free = [block for block, state in enumerate(states) if state in (COLD, READY)]
        present = {b for run in runs_of(free) for r in self._residency.present_runs(run) for b in range(*r)}
        assert present == {b for b in free if states[b] == READY}, "ready blocks are not those whose pages are present"
        assert self._cold_from <= self._next_cold(0), "a cold block lies below the first looked at"
        self._residency.check(runs_of(b for b, state in enumerate(states) if state in (HELD, CACHED, PADDING)))
