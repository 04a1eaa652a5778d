"""Homes of tensors: an arena of pages, or one range of anonymous memory. Knows no blocks and no layers.

    page     0          1           2          3
    arena    [ handle 7 | PROT_NONE | handle 8 | PROT_NONE ]     address + page · page_bytes
    tensor        one strided view over all of it; only mapped parts may be touched

A view never keeps pages mapped, and nothing here reads or writes them. A range is released only by `close()`, and only
when no page is mapped and no view is alive; else it stays reserved, so that a late access faults instead of hitting
somebody else's memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.utils.dlpack

from xllm_cli._vmm import AnonymousMemory, Views
from xllm_cli.vmm.driver import Driver, VmmError
from xllm_cli.vmm.pool import PagePool

logger = logging.getLogger(__name__)

# DLPack's type code (0 int, 1 unsigned, 2 float, 4 bfloat) and bits.
DLPACK_TYPES = {
    torch.bfloat16: (4, 16),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.uint8: (1, 8),
    torch.int8: (0, 8),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
}


HOST = (1, 0)  # DLPack's (type, number) of the device whose memory it is


class Range:
    """Addresses `[address, address + nbytes)` that tensors may look at; counts the views that are alive.

    `device` is DLPack's (type, number) of the device that tensors over it belong to.
    """

    def __init__(self, address: int, nbytes: int, device: tuple[int, int] = HOST) -> None:
        self.address = address
        self.nbytes = nbytes
        self._device = device
        self._views = Views()
        self._closed = False

    @property
    def num_views(self) -> int:
        """Tensors (storages) over this range that are still alive."""
        return self._views.count()

    def tensor(
        self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0
    ) -> torch.Tensor:
        """A view of `shape` at byte `offset`; `strides` in elements (None: contiguous). No memory is touched.

        Raises ValueError when an element would lie outside the range or the type has no DLPack code.
        """
        if self._closed:
            raise ValueError("the range is closed")
        if dtype not in DLPACK_TYPES:
            raise ValueError(f"no view of type {dtype}")
        steps = _contiguous(shape) if strides is None else list(strides)
        self._check_extent(shape, steps, offset=offset, itemsize=dtype.itemsize)
        code, bits = DLPACK_TYPES[dtype]
        kind, number = self._device
        capsule = self._views.capsule(self.address + offset, list(shape), steps, code, bits, kind, number)
        # looked up now: an extension that brings a device to torch replaces it
        view: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
        return view

    def _check_extent(self, shape: Sequence[int], steps: Sequence[int], *, offset: int, itemsize: int) -> None:
        if len(shape) != len(steps) or any(n < 0 for n in (*shape, *steps)):
            raise ValueError(f"shape {tuple(shape)} and strides {tuple(steps)} do not describe a view")
        elements = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) if all(shape) else 0
        if offset < 0 or offset % itemsize or offset + elements * itemsize > self.nbytes:
            raise ValueError(f"{elements * itemsize} bytes at offset {offset} do not fit into {self.nbytes} bytes")


class Arena(Range):
    """One reserved range of a driver; pages are put into it by index. Raises VmmShortage without address space.

    `nbytes` is rounded up to whole pages. INVARIANT: exactly the pages in `_handles` are mapped.
    """

    def __init__(self, driver: Driver, pool: PagePool, nbytes: int, device: tuple[int, int] = HOST) -> None:
        self.page_bytes = pool.page_bytes
        self.num_pages = -(-nbytes // self.page_bytes)
        super().__init__(driver.reserve(self.num_pages * self.page_bytes), self.num_pages * self.page_bytes, device)
        self._driver = driver
        self._pool = pool
        self._handles: dict[int, int] = {}

    @property
    def mapped_pages(self) -> int:
        return len(self._handles)

    def is_mapped(self, page: int) -> bool:
        return page in self._handles

    def handles(self) -> dict[int, int]:
        """page → handle of all that is mapped, in the order of the pages."""
        return dict(sorted(self._handles.items()))

    def map(self, pages: Sequence[int], handles: Sequence[int]) -> None:
        """Put `handles[i]` at `pages[i]`, all or none. Raises VmmShortage or VmmError; then nothing has changed."""
        addresses = self._addresses(pages)
        self._driver.map(list(zip(addresses, handles, strict=True)))
        self._handles.update(zip(pages, handles, strict=True))

    def unmap(self, pages: Sequence[int]) -> tuple[list[int], list[int]]:
        """Take pages away: (handles freed, pages stuck). A stuck page is still mapped and keeps its handle."""
        addresses = self._addresses(pages)
        failed = set(self._driver.unmap(addresses))
        stuck = [page for page, address in zip(pages, addresses, strict=True) if address in failed]
        freed = [self._handles.pop(page) for page in pages if page not in stuck]
        if stuck:
            reason = self._driver.last_failure()
            logger.warning("arena %#x: %d pages could not be unmapped, the last: %s", self.address, len(stuck), reason)
        return freed, stuck

    def _addresses(self, pages: Sequence[int]) -> list[int]:
        """Checked here: the driver would take a page of the neighbouring range for one of its own."""
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise IndexError(f"page {page} of an arena of {self.num_pages}")
        return [self.address + page * self.page_bytes for page in pages]

    def close(self) -> bool:
        """Release the range. False: a page is mapped, a view is alive or the driver refused; the range is kept until it
        can be released, see PagePool.closes()."""
        return self._pool.closes(self._close)

    def _close(self) -> bool:
        if self._closed:
            return True
        if self._handles or self.num_views:
            logger.warning(
                "arena %#x kept: %d pages mapped, %d views alive", self.address, len(self._handles), self.num_views
            )
            return False
        try:
            self._driver.release(self.address, self.nbytes)
        except VmmError as error:
            logger.warning("arena %#x kept: %s", self.address, str(error))  # a record would keep the error's frames
            return False
        self._closed = True
        return True


class AnonymousRange(Range):
    """Private zeroed memory touched by use: the physical KV cache on cpu. Raises VmmShortage without address space."""

    def __init__(self, nbytes: int) -> None:
        self._memory = AnonymousMemory(nbytes)
        super().__init__(self._memory.address, nbytes)

    def close(self) -> bool:
        """Free the memory. False: a view is alive; the memory is kept."""
        if not self._closed and self.num_views:
            logger.warning("anonymous range %#x kept: %d views alive", self.address, self.num_views)
            return False
        self._closed = True
        self._memory.free()
        return True


def _contiguous(shape: Sequence[int]) -> list[int]:
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= n
    return steps[::-1]
