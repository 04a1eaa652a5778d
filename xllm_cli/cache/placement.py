"""Which group of blocks the next free block comes from: the fullest page first.

Owns per-group totals and their order. A group is the blocks that begin on one page of the widest tensor (see
pages.Geometry); it knows no page state and no block's state.

For each group: used = held + cached blocks, ready = free blocks that cost no page, ready + used ≤ blocks of the group.
"""

from __future__ import annotations

from collections import OrderedDict

from xllm_cli.cache.pages import Geometry


class Placement:
    """Groups with ready blocks, by how many of their blocks are used; and groups that only cached blocks keep."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.used: list[int] = []
        self.held: list[int] = []
        self.ready: list[int] = []
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Groups with cached but no held blocks, longest idle first."""
        self._filed: list[int] = []
        self._by_use: dict[int, OrderedDict[int, None]] = {}
        self._uses = 0
        """Bit u is set while a group with u used blocks has ready ones."""

    def reach(self, group: int) -> None:
        """Know groups up to this one."""
        short = group + 1 - len(self.used)
        if short > 0:
            self.used.extend([0] * short)
            self.held.extend([0] * short)
            self.ready.extend([0] * short)
            self._filed.extend([-1] * short)

    def change(self, group: int, held: int, cached: int, ready: int) -> None:
        """Add to a group's totals."""
        if held:
            self.held[group] += held
        used = self.used[group]
        if held or cached:
            used += held + cached
            self.used[group] = used
            if self.held[group] or not used:
                self.idle.pop(group, None)
            else:
                self.idle.setdefault(group)
        left = self.ready[group] + ready
        self.ready[group] = left
        use = used if left else -1
        before = self._filed[group]
        if use != before:
            self._refile(group, before, use)

    def _refile(self, group: int, before: int, use: int) -> None:
        self._filed[group] = use
        if before >= 0:
            groups = self._by_use[before]
            del groups[group]
            if not groups:
                self._uses &= ~(1 << before)
        if use >= 0:
            if use not in self._by_use:
                self._by_use[use] = OrderedDict()
            self._by_use[use][group] = None
            self._uses |= 1 << use

    def fullest(self) -> int:
        """A group with ready blocks that has the most used ones. There must be a ready block."""
        return next(iter(self._by_use[self._uses.bit_length() - 1]))

    def check(self, held: list[int], cached: list[int], ready: list[int]) -> None:
        """Compare with a recount per group."""
        assert self.held == held, "held per group differs from a recount"
        assert self.used == [h + c for h, c in zip(held, cached, strict=True)], "used per group differs from a recount"
        assert self.ready == ready, "ready per group differs from a recount"
        assert set(self.idle) == {g for g, c in enumerate(cached) if c and not held[g]}, "idle groups differ"
        filed = {g: use for use, groups in self._by_use.items() for g in groups}
        assert filed == {g: u for g, u in enumerate(self.used) if ready[g]}, "order by use differs"
        assert self._uses == sum(1 << use for use, groups in self._by_use.items() if groups)
