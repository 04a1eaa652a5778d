"""Which pages the live blocks want, and which the ranks have mapped.

Owns what the ranks have acknowledged and, natively (`books`), the counts of live (held or cached) blocks per page, one
vector per distinct tensor width. It knows neither who holds a block nor the budget. BlockPool counts on the books; a
page that turned wanted or unwanted, other than from or to the spares, is filed here.

For each page exactly one holds (c = live blocks touching it, k = tensors of its width that have it mapped, m = all):
    absent   c = 0, k = 0
    settled  c > 0, k = m
    missing  c > 0, k < m    mapped by the next delta
    spare    c = 0, k = m    kept for a moment; blocks may use it at no cost
    leaving  c = 0, k > 0    unmapped by the next delta, and again until it succeeds
A page is *present* when it is settled, missing or spare: a block all of whose pages are present costs nothing.
Totals count every tensor's page once, so that bytes are pages times `page_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from xllm_cli._blocks import Widths
from xllm_cli.cache.pages import Geometry, Run, WidthPages
from xllm_cli.core import CacheSpec, PageDelta, PageRef

SPARE_SECONDS = 1.0
QUICK_RETRIES = 3
"""Failed unmaps in a row of one page after which the rank is unhealthy and retries come only once a second."""
RETRY_SECONDS = 1.0

Spare = tuple[int, int]
"""A spare page as (index of its width, page)."""


class Residency:
    """Pages of a virtual KV cache.

    `spare_pages` bounds the spares, rounded up to `pages_across`, a page of every tensor: blocks empty these together
    and want them together again, so that a bound between would keep none.
    """

    reclaims = True
    """Whether forgetting blocks can give bytes back."""

    def __init__(self, spec: CacheSpec, *, page_bytes: int, spare_pages: int) -> None:
        by_width: dict[int, list[int]] = {}
        for index, tensor in enumerate(spec.tensors):
            by_width.setdefault(tensor.bytes_per_block, []).append(index)
        self.page_bytes = page_bytes
        self.widths = [WidthPages(w, page_bytes, tuple(by_width[w])) for w in sorted(by_width, reverse=True)]
        self.pages_across = sum(len(pages.tensors) for pages in self.widths)
        self.max_spare_pages = -(-spare_pages // self.pages_across) * self.pages_across
        self._width_of = {tensor: pages for pages in self.widths for tensor in pages.tensors}
        self.books = Widths([pages.counts for pages in self.widths])
        self.mapped_pages = self.missing_pages = self.leaving_pages = 0
        self._retry_at = 0.0

    @property
    def geometry(self) -> Geometry:
        """Blocks are grouped by the widest tensor's page they begin on; a block of a page or more is its own group."""
        widest = self.widths[0].width
        return Geometry(widest, self.page_bytes) if widest < self.page_bytes else Geometry(1, 1)

    @property
    def mapped_bytes(self) -> int:
        return self.mapped_pages * self.page_bytes

    @property
    def coming_pages(self) -> int:
        """By how many pages the next delta makes `mapped` grow; negative: shrink."""
        return self.missing_pages - self.leaving_pages

    @property
    def wanted_pages(self) -> int:
        """Pages, over all tensors, that live blocks touch, and those stuck."""
        return self.mapped_pages + self.coming_pages - self.spare_pages

    @property
    def unwanted_bytes(self) -> int:
        """Mapped bytes on pages no live block touches: spares, and pages leaving or stuck."""
        stray = sum(pages.num_mapped[page] for pages in self.widths for page in pages.leaving)
        return (self.spare_pages + stray) * self.page_bytes

    # --- blocks come and go -----------------------------------------------------------------------------------------

    @property
    def spare_pages(self) -> int:
        """Mapped pages, over all tensors, that no block wants and that are kept for a moment."""
        total = 0
        for pages in self.widths:
            total += pages.counts.num_spares * len(pages.tensors)
        return total

    def retain(self, start: int, stop: int) -> None:
        """The blocks `[start, stop)` become live."""
        self.books.retain(start, stop)
        self.file_turned()

    def release(self, start: int, stop: int) -> None:
        """The blocks `[start, stop)` are live no more."""
        self.books.release(start, stop)
        self.file_turned()

    def file_turned(self) -> None:
        """File the pages that a first block came to, or a last one left, and that are no spares."""
        for index, page in self.books.take_turned():
            self.widths[index].reach(page)
            self._file(self.widths[index], page)

    def _file(self, pages: WidthPages, page: int, *, keep: bool = True) -> None:
        """Put a page on the one list that fits its counts."""
        self.missing_pages -= pages.missing.pop(page, 0)
        self.leaving_pages -= pages.leaving.pop(page, 0)
        mapped, every, counts = pages.num_mapped[page], len(pages.tensors), pages.counts
        usable = mapped == every and page not in pages.stuck
        counts.set_usable(page, usable)
        if counts.live(page):
            if mapped < every:
                pages.missing[page] = every - mapped
                self.missing_pages += every - mapped
            return
        if usable and keep:
            counts.add_spare(page, self.books.now)
            return
        counts.remove_spare(page)
        if mapped:
            pages.leaving[page] = mapped - len(pages.stuck.get(page, ()))
            self.leaving_pages += pages.leaving[page]

    # --- what blocks would cost -------------------------------------------------------------------------------------

    def present_runs(self, run: Run) -> list[Run]:
        """The parts of a run whose blocks have all their pages present."""
        runs = [run]
        for pages in self.widths:
            kept: list[Run] = []
            for start, stop in runs:
                for page in range(pages.first_page(start), pages.last_page(stop - 1) + 1):
                    if not pages.is_present(page):
                        first, end = pages.blocks_of(page)
                        if first > start:
                            kept.append((start, first))
                        start = max(start, end)
                if start < stop:
                    kept.append((start, stop))
            runs = kept
        return runs

    def pages_of(self, runs: Iterable[Run]) -> int:
        """The pages, over all tensors, that the given blocks touch together. O(pages)."""
        runs = list(runs)
        total = 0
        for pages in self.widths:
            touched = {page for a, b in runs for page in range(pages.first_page(a), pages.last_page(b - 1) + 1)}
            total += len(touched) * len(pages.tensors)
        return total

    def packed_pages(self, num_blocks: int) -> int:
        """The pages, over all tensors, of so many blocks packed from block 0 on."""
        if num_blocks <= 0:
            return 0
        return sum((pages.last_page(num_blocks - 1) + 1) * len(pages.tensors) for pages in self.widths)

    def packed_blocks(self, nbytes: int) -> int:
        """The most blocks whose pages, packed from block 0 on, fit `nbytes`."""
        room = nbytes // self.page_bytes
        low, high = 0, max(0, nbytes) // sum(pages.width * len(pages.tensors) for pages in self.widths)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.packed_pages(middle) <= room else (low, middle - 1)
        return low

    # --- spares -----------------------------------------------------------------------------------------------------

    def spares(self) -> Iterator[tuple[Spare, Run]]:
        """Every spare with the blocks that touch it."""
        for index, pages in enumerate(self.widths):
            for page in pages.counts.spares():
                yield (index, page), pages.blocks_of(page)

    def tensors_of(self, spare: Spare) -> int:
        """How many tensors' pages a spare stands for."""
        return len(self.widths[spare[0]].tensors)

    def give_up(self, spares: Iterable[Spare]) -> None:
        """Let these spares leave with the next delta."""
        for index, page in spares:
            self._file(self.widths[index], page, keep=False)

    def give_up_pages(self, count: int) -> None:
        """Let spares of at least `count` pages leave, oldest first, or all there are."""
        stop_at = self.spare_pages - count
        for pages in self.widths:
            while pages.counts.num_spares and self.spare_pages > stop_at:
                self._file(pages, pages.counts.oldest_spare(), keep=False)

    def expire(self, now: float) -> None:
        """Give up the spares that are a second old or too many."""
        self.books.now = now
        self.give_up_pages(self.spare_pages - self.max_spare_pages)
        for pages in self.widths:
            counts = pages.counts
            while counts.num_spares and now - counts.since(counts.oldest_spare()) >= SPARE_SECONDS:
                self._file(pages, counts.oldest_spare(), keep=False)

    # --- the delta --------------------------------------------------------------------------------------------------

    def delta(self, now: float, copies: tuple[tuple[int, int], ...] = ()) -> PageDelta:
        """The page changes that make `mapped` what is wanted, plus the spares. O(pages that change)."""
        to_map: list[PageRef] = []
        to_unmap: list[PageRef] = []
        retry = self._retry_due(now)
        for pages in self.widths:
            for page in pages.missing:
                have = pages.mapped_tensors(page)
                to_map += [PageRef(tensor, page) for tensor in pages.tensors if tensor not in have]
            for page in pages.leaving:
                stuck = {} if retry else pages.stuck.get(page, {})
                to_unmap += [PageRef(tensor, page) for tensor in pages.mapped_tensors(page) if tensor not in stuck]
        return PageDelta(tuple(sorted(to_map)), tuple(sorted(to_unmap)), copies)

    def apply(self, *, mapped: Sequence[PageRef], unmapped: Sequence[PageRef], failed: Sequence[PageRef]) -> None:
        """What the ranks did: pages mapped, pages unmapped, and pages whose unmap failed (they stay mapped)."""
        self._change(unmapped, mapped=False)
        self._change(mapped, mapped=True)
        for tensor, page in failed:
            pages = self._width_of[tensor]
            failures = pages.stuck.setdefault(page, {})
            failures[tensor] = failures.get(tensor, 0) + 1
            self._file(pages, page)
        if failed and self.unmap_failures >= QUICK_RETRIES:
            self._retry_at = self.books.now + RETRY_SECONDS

    def _change(self, refs: Sequence[PageRef], *, mapped: bool) -> None:
        tensors_of: dict[Spare, list[int]] = {}
        for tensor, page in refs:
            tensors_of.setdefault((self._width_of[tensor].width, page), []).append(tensor)
        for (_, page), tensors in tensors_of.items():
            pages = self._width_of[tensors[0]]
            pages.change_mapped(page, tensors, mapped=mapped)
            self._file(pages, page)
        self.mapped_pages += len(refs) if mapped else -len(refs)

    @property
    def unmap_failures(self) -> int:
        """The most failed unmaps in a row of any one page; 0 when none is stuck."""
        return max((n for pages in self.widths for stuck in pages.stuck.values() for n in stuck.values()), default=0)

    def _retry_due(self, now: float) -> bool:
        return now >= self._retry_at or self.unmap_failures < QUICK_RETRIES

    def next_deadline(self, now: float) -> float | None:
        """When a delta will be due without any block moving; `now` when one is due already."""
        if self.spare_pages > self.max_spare_pages:
            return now
        due: list[float] = []
        for pages in self.widths:
            if pages.missing or any(pages.leaving.values()):
                return now
            if pages.counts.num_spares:
                due.append(pages.counts.since(pages.counts.oldest_spare()) + SPARE_SECONDS)
            if pages.leaving:
                due.append(now if self._retry_due(now) else self._retry_at)
        return min(due, default=None)

    # --- accounts ---------------------------------------------------------------------------------------------------

    def unmapped_parts(self) -> Iterator[tuple[int, int]]:
        """(block, bytes) for what of each block lies on wanted pages that are not mapped yet. O(missing pages)."""
        for pages in self.widths:
            for page, tensors in pages.missing.items():
                for block in range(*pages.blocks_of(page)):
                    yield block, pages.overlap(page, block) * tensors

    def is_mapped(self, ref: PageRef) -> bool:
        """Whether the ranks have acknowledged this page as mapped."""
        return ref.tensor in self._width_of[ref.tensor].mapped_tensors(ref.page)

    def check(self, live_runs: Sequence[Run]) -> None:
        """Recount everything from the live blocks; an AssertionError names what differs."""
        missing = spare = leaving = mapped = 0
        for pages in self.widths:
            live = pages.counts.counts()
            counts = [0] * len(live)
            for block in (block for run in live_runs for block in range(*run)):
                for page in range(pages.first_page(block), pages.last_page(block) + 1):
                    counts[page] += 1
            assert counts == live, f"live counts of width {pages.width} differ from a recount"
            _check_lists(pages)
            missing += sum(pages.missing.values())
            spare += pages.counts.num_spares * len(pages.tensors)
            leaving += sum(pages.leaving.values())
            mapped += sum(pages.num_mapped)
        totals = (self.missing_pages, self.spare_pages, self.leaving_pages, self.mapped_pages)
        assert totals == (missing, spare, leaving, mapped), f"totals {totals} against {missing, spare, leaving, mapped}"


def _check_lists(pages: WidthPages) -> None:
    every, counts = len(pages.tensors), pages.counts
    spares = set(counts.spares())
    assert len(spares) == counts.num_spares, "a spare twice"
    for page, mapped in enumerate(pages.num_mapped):
        live = counts.live(page)
        assert (page in pages.partial) == (0 < mapped < every), f"page {page}: {mapped} of {every} mapped"
        assert (page in pages.missing) == (live > 0 and mapped < every), f"page {page} wrongly missing or not"
        unwanted = (page in spares) + (page in pages.leaving)
        assert unwanted == (live == 0 and mapped > 0), f"page {page} must be spare or leaving exactly when unwanted"
        assert page not in spares or (mapped == every and page not in pages.stuck), f"page {page} is no spare"
    beyond = range(len(pages.num_mapped), len(counts.counts()))
    assert not any(counts.live(page) for page in beyond), "a live page was never filed"
