"""The page arithmetic of tensors of one width: which blocks touch a page, how many do, what new blocks would cost.

Knows neither who holds a block nor why a page changes.

    block ids      0     1     2     3          Block b of a tensor of width w covers bytes [b·w, (b+1)·w).
    w = 3, P = 4  |-----|-----|-----|-----|     A page is wanted while any live block touches it: here page 0 is
    pages         [   0   |   1   |   2   ]     touched by blocks 0 and 1, page 1 by 1 and 2, page 2 by 2 and 3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from xllm_cli._blocks import Pages

Run = tuple[int, int]
"""Blocks `[start, stop)`, never empty."""

NO_BLOCK = 1 << 62
"""Above every block id."""


def runs_of(blocks: Iterable[int]) -> list[Run]:
    """Consecutive ascending ids joined, in the order given."""
    runs: list[Run] = []
    start = stop = -1
    for block in blocks:
        if block == stop:
            stop += 1
            continue
        if start >= 0:
            runs.append((start, stop))
        start, stop = block, block + 1
    if start >= 0:
        runs.append((start, stop))
    return runs


class Geometry(NamedTuple):
    """How placement groups blocks: block b belongs to group b·width // page."""

    width: int
    page: int


class WidthPages:
    """The pages of all tensors of one width: equal counts, so one vector serves them. `tensors` are spec indices.

    `counts` (native) has the live blocks that touch each page, and the spares. `num_mapped[p]` counts the tensors that
    have page p mapped (`partial` says which, where it is only some). `missing` and `leaving` are kept by Residency,
    `stuck` counts each tensor's failed unmaps of a page.
    """

    def __init__(self, width: int, page_bytes: int, tensors: tuple[int, ...]) -> None:
        self.width, self.page_bytes, self.tensors = width, page_bytes, tensors
        self.counts = Pages(width, page_bytes, len(tensors))
        self.num_mapped: list[int] = []
        self.partial: dict[int, set[int]] = {}
        self.stuck: dict[int, dict[int, int]] = {}
        self.missing: dict[int, int] = {}
        self.leaving: dict[int, int] = {}

    def first_page(self, block: int) -> int:
        return block * self.width // self.page_bytes

    def last_page(self, block: int) -> int:
        return ((block + 1) * self.width - 1) // self.page_bytes

    def blocks_of(self, page: int) -> Run:
        """The blocks that touch a page."""
        return page * self.page_bytes // self.width, -(-(page + 1) * self.page_bytes // self.width)

    def overlap(self, page: int, block: int) -> int:
        """The bytes of a block that lie on a page."""
        start, stop = block * self.width, (block + 1) * self.width
        return max(0, min(stop, (page + 1) * self.page_bytes) - max(start, page * self.page_bytes))

    def is_present(self, page: int) -> bool:
        return self.counts.is_present(page)

    def reach(self, page: int) -> None:
        """Make the vector cover a page; it grows by half, never to the arena's size at once."""
        short = page + 1 - len(self.num_mapped)
        if short > 0:
            self.num_mapped.extend([0] * max(short, len(self.num_mapped) // 2))

    def mapped_tensors(self, page: int) -> Collection[int]:
        """The tensors that have the page mapped."""
        if page >= len(self.num_mapped) or not self.num_mapped[page]:
            return ()
        return self.partial.get(page, self.tensors)

    def change_mapped(self, page: int, tensors: Sequence[int], *, mapped: bool) -> None:
        """These tensors mapped, or unmapped, the page; each must have been the other way."""
        self.reach(page)
        every = len(self.tensors)
        if len(tensors) == every and self.num_mapped[page] == (0 if mapped else every) and page not in self.stuck:
            self.num_mapped[page] = every if mapped else 0  # all at once, which is the rule
            return
        have = set(self.mapped_tensors(page))
        assert len(set(tensors)) == len(tensors), f"page {page}: a tensor twice in {tensors}"
        assert all((t in have) != mapped for t in tensors), f"page {page}: mapped {mapped} already for {tensors}"
        have.symmetric_difference_update(tensors)
        self.num_mapped[page] = len(have)
        if 0 < len(have) < every:
            self.partial[page] = have
        else:
            self.partial.pop(page, None)
        if not mapped:
            self.forget_failures(page, tensors)

    def forget_failures(self, page: int, tensors: Sequence[int]) -> None:
        """Their unmaps succeeded at last."""
        failures = self.stuck.get(page)
        if failures is not None:
            for tensor in tensors:
                failures.pop(tensor, None)
            if not failures:
                del self.stuck[page]
