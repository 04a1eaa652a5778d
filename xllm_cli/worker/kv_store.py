"""The KV tensors of one rank: their arenas, and the page changes of a plan applied all or nothing.

Owns arenas and what is mapped in them. Does not know blocks, sequences or budgets: pages come in a PageDelta.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from xllm_cli.core import PageDelta, PageRef
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.driver import VmmError
from xllm_cli.vmm.pool import PagePool


@dataclass(frozen=True, slots=True)
class DeltaOutcome:
    """`mapped` False: this delta's maps are undone. `stuck`: pages still mapped although they should not be."""

    mapped: bool
    stuck: tuple[PageRef, ...] = ()
    shortage: str = ""


class KvStore(Protocol):
    """Where the KV tensors live."""

    def apply(self, delta: PageDelta, keep_free: int) -> DeltaOutcome:
        """Unmap, map, then copy; on failure undo the maps. `keep_free`: bytes that growth leaves free on the device."""
        ...

    def mapped_of(self, pages: Iterable[PageRef]) -> list[PageRef]:
        """Those of `pages` that are mapped now."""
        ...

    def trim(self) -> None:
        """Give surplus handles back to the device."""
        ...

    @property
    def owned_bytes(self) -> int:
        """Distinct handles this rank owns, in bytes."""
        ...

    @property
    def free_handle_bytes(self) -> int:
        """Handles owned but not mapped, in bytes."""
        ...

    def tensor(
        self, index: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int, /
    ) -> torch.Tensor:
        """A strided view of KV tensor `index`; `offset` and `strides` in elements."""
        ...

    def close(self) -> bool:
        """Unmap and release everything; False if something is still in use and was kept."""
        ...


class TensorRange(Protocol):
    """Memory of one physical KV tensor."""

    def tensor(
        self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0
    ) -> torch.Tensor:
        """A view of `shape` at byte `offset`; `strides` in elements."""
        ...

    def close(self) -> bool:
        """Free the memory. False: a view is alive; the memory is kept."""
        ...


class VirtualKvStore:
    """KV tensors in arenas of a page pool."""

    def __init__(
        self,
        arenas: Sequence[Arena],
        pool: PagePool,
        page_bytes: int,
        *,
        fence: Callable[[], None],
        block_bytes: Sequence[int] = (),
    ) -> None:
        """`fence` returns when the device no longer works on any page: nothing is unmapped before. `block_bytes`, each
        tensor's bytes of a block, are needed for deltas with copies."""
        self._block_bytes = list(block_bytes)
        self._fence = fence
        self._arenas = list(arenas)
        self._pool = pool
        self._page_bytes = page_bytes

    def apply(self, delta: PageDelta, keep_free: int) -> DeltaOutcome:
        """See KvStore. Handles freed by the unmaps are the first to be mapped again."""
        if delta.unmap:
            self._fence()
        stuck = self._unmap(delta.unmap)
        try:
            if delta.map:
                handles = self._pool.take(len(delta.map), keep_free=keep_free)
                if handles is None:
                    return DeltaOutcome(False, stuck, self._pool.last_shortage)
                self._map(delta.map, handles)
        except VmmError as error:  # the device refused: as unavailable as a shortage, and the text says which
            return DeltaOutcome(False, stuck + self._unmap(self.mapped_of(delta.map)), str(error))
        if delta.copies:
            self._copy(delta.copies)
        return DeltaOutcome(True, stuck)

    def _copy(self, copies: Iterable[tuple[int, int]]) -> None:
        """The KV of each first block goes to the second; both are mapped. The views are dropped at once."""
        for arena, width in zip(self._arenas, self._block_bytes, strict=True):
            blocks = arena.tensor(torch.uint8, (arena.nbytes // width, width))
            for source, target in copies:
                blocks[target].copy_(blocks[source])

    def _map(self, pages: Iterable[PageRef], handles: list[int]) -> None:
        """Map tensor by tensor; what a failing arena did not take goes back to the pool before the error leaves."""
        taken = iter(handles)
        try:
            for tensor, numbers in _by_tensor(pages).items():
                mine = [next(taken) for _ in numbers]
                try:
                    self._arenas[tensor].map(numbers, mine)
                except VmmError:
                    self._pool.give(mine)
                    raise
        finally:
            self._pool.give(list(taken))

    def _unmap(self, pages: Iterable[PageRef]) -> tuple[PageRef, ...]:
        stuck: list[PageRef] = []
        for tensor, numbers in _by_tensor(pages).items():
            freed, failed = self._arenas[tensor].unmap(numbers)
            self._pool.give(freed)
            stuck += [PageRef(tensor, page) for page in failed]
        return tuple(stuck)

    def mapped_of(self, pages: Iterable[PageRef]) -> list[PageRef]:
        """See KvStore."""
        return [ref for ref in pages if self._arenas[ref.tensor].is_mapped(ref.page)]

    def trim(self) -> None:
        """See KvStore; a fixed pool keeps its handles."""
        self._pool.trim()

    @property
    def owned_bytes(self) -> int:
        """See KvStore."""
        return self._pool.owned * self._page_bytes

    @property
    def free_handle_bytes(self) -> int:
        """See KvStore."""
        return self._pool.free_handles * self._page_bytes

    def tensor(
        self, index: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int, /
    ) -> torch.Tensor:
        """See KvStore. Touches no memory; only mapped pages may ever be read or written through it."""
        return self._arenas[index].tensor(dtype, shape, strides, offset * dtype.itemsize)

    def mapped_pages(self) -> int:
        """Distinct pages mapped now, over all tensors."""
        return sum(arena.mapped_pages for arena in self._arenas)

    def close(self) -> bool:
        """See KvStore."""
        closed = self._pool.closes(self._close_arenas)
        return self._pool.close() and closed

    def _close_arenas(self) -> bool:
        for arena in self._arenas:
            freed, _ = arena.unmap([*arena.handles()])
            self._pool.give(freed)
        return all([arena.close() for arena in self._arenas])


class PhysicalKvStore:
    """KV tensors in ordinary memory, reserved once and backed as they are touched; no page ever changes.

    `pool` is the one that weights alone live in; None: nothing lives in pages.
    """

    def __init__(self, ranges: Sequence[TensorRange], pool: PagePool | None = None) -> None:
        self._ranges = list(ranges)
        self._pool = pool

    def apply(self, delta: PageDelta, keep_free: int) -> DeltaOutcome:
        """See KvStore: an always resident cache has no page changes."""
        assert not delta
        return DeltaOutcome(True)

    def mapped_of(self, pages: Iterable[PageRef]) -> list[PageRef]:
        """See KvStore: everything is, for ever."""
        return list(pages)

    def trim(self) -> None:
        """See KvStore."""
        if self._pool is not None:
            self._pool.trim()

    @property
    def owned_bytes(self) -> int:
        """See KvStore: those of weights."""
        return 0 if self._pool is None else self._pool.owned * self._pool.page_bytes

    @property
    def free_handle_bytes(self) -> int:
        """See KvStore."""
        return 0 if self._pool is None else self._pool.free_handles * self._pool.page_bytes

    def tensor(
        self, index: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int, /
    ) -> torch.Tensor:
        """See KvStore."""
        return self._ranges[index].tensor(dtype, shape, strides, offset * dtype.itemsize)

    def close(self) -> bool:
        """See KvStore."""
        closed = all([r.close() for r in self._ranges])
        return (self._pool is None or self._pool.close()) and closed


def _by_tensor(pages: Iterable[PageRef]) -> dict[int, list[int]]:
    grouped: dict[int, list[int]] = defaultdict(list)
    for tensor, page in pages:
        grouped[tensor].append(page)
    return grouped
