"""The home of one model's parameters: an arena whose pages are all there, all set aside, or all gone.

    resident   [ w0 | w1 | w2 … )      every page below `used` is mapped
    parked     unmapped, the handles kept: back by mapping alone, same bytes
    absent     unmapped, the handles given to the pool: back by filling fresh pages

Addresses never change, so tensors over them stay valid through all of it; they may be touched only while resident.
A verb that fails has changed nothing, and may be tried again. Only where the device refuses the undoing, too, does a
page stay where it is: counted, and put right by the next verb. Knows no file, no checkpoint and no reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, Literal

import torch

from xllm_cli.errors import DeviceError, MemoryShortage, ModelError
from xllm_cli.vmm.arena import HOST, Arena
from xllm_cli.vmm.driver import Driver, VmmError, VmmShortage
from xllm_cli.vmm.pool import PagePool

ALIGNMENT = 64  # bytes: a cache line
FILL_PAGES = 8  # mapped and filled at a time: small beside a model, large beside a look at free memory
FILLS_AHEAD = 4  # handed to the threads before the first of them must have ended
POLL_SECONDS = 0.005  # between two pauses while they fill
FILL_THREADS = 2  # beside the one that makes pages: zeroing them takes as long as filling them
CHANGED = "the checkpoint is not the one that was loaded: its parameters differ in number, shape or type"

State = Literal["resident", "parked", "absent"]
Fill = Callable[[torch.Tensor, int], None]


class WeightArena:
    """Memory for parameters, handed out once and then moved as a whole.

    INVARIANT, of the pages below `used`: resident: all are mapped, none is kept. parked: each is kept, or still mapped
    if it was stuck. absent: none is kept, and only what was stuck is mapped.
    """

    def __init__(  # noqa: PLR0913 - what every arena of a device has
        self,
        driver: Driver,
        pool: PagePool,
        nbytes: int,
        *,
        device: tuple[int, int] = HOST,
        fence: Callable[[], None] = lambda: None,
        keep_free: int = 0,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        """Reserve `nbytes` of addresses, no page yet. `fence` returns when the device works on none of them;
        `keep_free` are bytes that taking pages leaves free on the device. `pause` is called often while all of it is
        filled or read: others may go on then, and what it raises ends the verb."""
        self._arena = Arena(driver, pool, nbytes, device)
        self._pool = pool
        self._is_host = device == HOST
        self._fence = fence
        self._keep_free = keep_free
        self._pause = pause
        self._kept: dict[int, int] = {}  # page → handle
        self._forms: dict[int, tuple[torch.Size, torch.dtype]] = {}  # of what was taken, by its first byte
        self.state: State = "resident"
        self.used = 0

    @property
    def pages(self) -> int:
        """Pages that the parameters need when resident."""
        return -(-self.used // self._pool.page_bytes)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of pages mapped now."""
        return self._arena.mapped_pages * self._pool.page_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of pages set aside by park()."""
        return len(self._kept) * self._pool.page_bytes

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for one parameter, contiguous. MemoryShortage with the numbers if there is no page for it."""
        assert self.state == "resident", "parameters are taken while the model is loaded"
        start, end = _place(self.used, shape, dtype)
        if end > self._arena.nbytes:
            raise MemoryShortage(f"the weights need more than the {self._arena.nbytes} bytes reserved for them")
        self._map_up_to(-(-end // self._pool.page_bytes))
        self.used = end
        self._forms[start] = torch.Size(shape), dtype
        return self._arena.tensor(dtype, shape, offset=start)

    def view(self, shape: Sequence[int], dtype: torch.dtype, used: int) -> tuple[torch.Tensor, int]:
        """What take() gave when `used` bytes were taken, and how many were taken then. ModelError if that was something
        of another form."""
        start, end = _place(used, shape, dtype)
        if self._forms.get(start) != (torch.Size(shape), dtype):
            raise ModelError(CHANGED)
        return self._arena.tensor(dtype, shape, offset=start), end

    def _map_up_to(self, pages: int) -> None:
        missing = list(range(self._arena.mapped_pages, pages))
        if missing and not self._map_fresh(missing, self._keep_free):
            raise MemoryShortage(f"the weights do not fit: {self._pool.last_shortage}")

    # --- moving all of it

    def park(self) -> None:
        """resident → parked. Raises VmmError if a page stays mapped; the others are mapped again then."""
        assert self.state == "resident"
        handles = self._handles()
        stuck = self._unmap()
        self._kept = {page: handle for page, handle in handles.items() if page not in stuck}
        self.state = "parked"
        if stuck:
            self.unpark()
            raise self._stays_mapped(stuck)

    def unpark(self) -> None:
        """parked → resident, by mapping alone. Raises VmmError (VmmShortage); what is set aside stays so then."""
        assert self.state == "parked"
        self._arena.map(list(self._kept), list(self._kept.values()))
        self._kept = {}
        self.state = "resident"

    def discard(self) -> None:
        """resident or parked → absent: every handle to the pool. Raises VmmError as park() does."""
        if self.state == "resident":
            self.park()
        if self.state == "parked":
            handles = self._handles()
            stuck = self._unmap()
            self._kept |= {page: handle for page, handle in handles.items() if page not in stuck}
            if stuck:
                raise self._stays_mapped(stuck)
            self._pool.give(list(self._kept.values()))
            self._kept = {}
            self.state = "absent"

    def restore(
        self, fill: Fill, *, keep_free: Callable[[], int] = lambda: 0, settle: Callable[[], None] = lambda: None
    ) -> str:
        """absent → resident: fresh pages, filled a few at a time by `fill(bytes, offset)`, bytes being uint8 [n]. Host
        memory is filled by threads while the next pages are made: `fill` must bear that. A device's may be filled
        later: `settle` returns when all is. `keep_free()` is asked before each few.

        "" if it went well; else why there are no pages, and nothing has changed. What these raise, a pause, and a
        VmmError, leave it absent too.
        """
        assert self.state == "absent"
        try:
            with self._filler() as filler:  # its end waits for what is being filled: only then may pages go
                filled: list[Future[None]] = []
                for first in range(0, self.pages, FILL_PAGES):
                    self._await(filled[-FILLS_AHEAD:][:1] if len(filled) >= FILLS_AHEAD else ())
                    last = min(first + FILL_PAGES, self.pages)
                    missing = [page for page in range(first, last) if not self._arena.is_mapped(page)]
                    if missing and not self._map_fresh(missing, max(self._keep_free, keep_free())):
                        return self._pool.last_shortage
                    start = first * self._pool.page_bytes
                    chunk = self._bytes(start, min(last * self._pool.page_bytes, self.used))
                    filled.append(filler.submit(fill, chunk, start))
                self._await(filled)
            _settle(filled)
            settle()
            self.state = "resident"
        finally:
            if self.state != "resident":
                handles = self._handles()
                stuck = self._unmap()
                self._pool.give([handle for page, handle in handles.items() if page not in stuck])
        return ""

    def _await(self, filled: Sequence[Future[None]]) -> None:
        """Pause until these have ended, once at least."""
        self._pause()
        while wait(filled, POLL_SECONDS).not_done:
            self._pause()

    def _filler(self) -> Executor:
        return ThreadPoolExecutor(FILL_THREADS, "weights") if self._is_host else _AtOnce()

    def read(self, take: Fill) -> None:
        """Show all bytes in order, a few pages at a time, to `take(bytes, offset)`."""
        assert self.state == "resident"
        step = FILL_PAGES * self._pool.page_bytes
        for start in range(0, self.used, step):
            self._pause()
            take(self._bytes(start, min(start + step, self.used)), start)

    def close(self) -> bool:
        """Give everything back; False if a page is stuck or a tensor over it still lives: the range is kept until it
        can be released, see PagePool.closes()."""
        return self._pool.closes(self._close)

    def _close(self) -> bool:
        try:
            self.discard()
        except (VmmError, DeviceError):  # a page, or the fence
            return False
        return self._arena.close()

    def check(self) -> None:
        """Assert the invariant; for tests."""
        mapped, kept, wanted = set(self._handles()), set(self._kept), set(range(self.pages))
        assert not mapped & kept, f"pages {sorted(mapped & kept)} are mapped and kept"
        assert mapped | kept <= wanted, f"pages {sorted((mapped | kept) - wanted)} are nobody's"
        assert self.state == "absent" or mapped | kept == wanted, f"{self.state}: {sorted(wanted - mapped - kept)} lost"
        assert self.state == "parked" or not kept, f"{self.state}: pages {sorted(kept)} are kept"

    def _bytes(self, start: int, end: int) -> torch.Tensor:
        return self._arena.tensor(torch.uint8, [end - start], offset=start)

    def _map_fresh(self, pages: list[int], keep_free: int) -> bool:
        """Pages of the pool at these places; False, with the pool saying why, if it is short."""
        handles = self._pool.take(len(pages), keep_free=keep_free)
        if handles is None:
            return False
        try:
            self._arena.map(pages, handles)
        except VmmError as error:
            self._pool.give(handles)
            if not isinstance(error, VmmShortage):
                raise
            self._pool.last_shortage = str(error)
            return False
        return True

    def _handles(self) -> dict[int, int]:
        """page → handle of what is mapped."""
        return self._arena.handles()

    def _unmap(self) -> set[int]:
        """Unmap whatever is mapped; the pages that stay."""
        mapped = list(self._handles())
        if not mapped:
            return set()
        self._fence()
        return set(self._arena.unmap(mapped)[1])

    def _stays_mapped(self, stuck: set[int]) -> VmmError:
        return VmmError("unmap", 0, self._arena.address, f"{len(stuck)} pages of the weights stay mapped")


def _settle(filled: list[Future[None]]) -> None:
    """Raise what the first that failed raised. Forgets them all: an error holds the frames that hold its memory."""
    error = next(filter(None, (each.exception() for each in filled)), None)
    filled.clear()
    try:
        if error is not None:
            raise error
    finally:
        del error


class _AtOnce(Executor):
    """No thread but the caller's, which is the one that holds the device's context."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args, **more))
        return done


def _place(used: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, int]:
    start = -(-used // ALIGNMENT) * ALIGNMENT
    return start, start + torch.Size(shape).numel() * dtype.itemsize
