"""The page pool: which physical pages a rank owns. Knows no addresses, no tensors and no reason for a page.

An owned handle is either free here or in somebody's hands (taken). Elastic pools create on demand and destroy what is
free on `trim`; a fixed pool creates everything at the start and keeps it until `close`.
"""

from __future__ import annotations

import fcntl
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from xllm_cli.errors import MemoryShortage
from xllm_cli.vmm.driver import Driver, VmmShortage

LOCK_DEADLINE_SECONDS = 1.0
CLOSE_AGAIN_SECONDS = 1.0
FIXED_BATCH_PAGES = 64
FIXED_THREADS = 4


class DeviceLock:
    """A flock shared by all engines of one device, so that reading free memory and creating are one step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = self._open()

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    @contextmanager
    def hold(self, deadline_seconds: float = LOCK_DEADLINE_SECONDS) -> Iterator[bool]:
        """True inside: the lock is ours. False: another engine kept it until the deadline."""
        self._reopen()
        deadline = time.monotonic() + deadline_seconds
        pause = 0.0005
        while not self._try_lock():
            if time.monotonic() >= deadline:
                yield False
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        try:
            yield True
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _reopen(self) -> None:
        """Follow the path if somebody tidied the file away: whoever starts now locks a new one."""
        try:
            seen, ours = os.stat(self._path, follow_symlinks=False), os.fstat(self._fd)
            if (seen.st_dev, seen.st_ino) == (ours.st_dev, ours.st_ino):
                return
            fd = self._open()
        except OSError:
            return  # gone with its folder: whoever starts next makes both, and they are found here then
        os.close(self._fd)
        self._fd = fd

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._fd)


class PagePool:
    """The handles of one rank: owned = free + taken.

    `fixed_pages` None is an elastic pool. `lock_path` is the device's lock file for elastic creation (None: no
    neighbours). `progress(done, total)` is called while a fixed pool is created. Raises MemoryShortage when a fixed
    pool does not fit.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        page_bytes: int,
        fixed_pages: int | None = None,
        lock_path: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        assert page_bytes == driver.info().page_bytes, "the pool's page is the driver's page"
        self.page_bytes = page_bytes
        self.is_fixed = fixed_pages is not None
        self.last_shortage = ""
        self._driver = driver
        self._users = 0
        self._owned: set[int] = set()
        self._unclosed: list[Callable[[], bool]] = []
        self._closes_at = 0.0
        self._free: list[int] = []  # rising: adjacent pages together, so that runs of them share a kernel mapping
        self._lock = DeviceLock(lock_path) if lock_path is not None else None
        if fixed_pages is not None:
            self._fill(fixed_pages, progress)

    @property
    def owned(self) -> int:
        """Pages created and not destroyed."""
        return len(self._owned)

    @property
    def free_handles(self) -> int:
        """Pages owned and in nobody's hands."""
        return len(self._free)

    def take(self, count: int, *, keep_free: int = 0) -> list[int] | None:
        """`count` handles, free ones first; an elastic pool creates the rest if `keep_free` bytes stay free then.

        None: short, nothing changed, `last_shortage` says why with numbers. Raises VmmError if the device fails.
        """
        missing = count - len(self._free)
        if missing > 0 and not self._create(missing, keep_free):
            return None
        taken = self._free[:count]
        del self._free[:count]
        return taken

    def give(self, handles: list[int]) -> None:
        """Back to the free list. The caller has unmapped them."""
        assert self._owned.issuperset(handles), "a pool is given only what it owns"
        for handle in handles:
            place = bisect_left(self._free, handle)
            assert self._free[place : place + 1] != [handle], "a handle is given back twice"
            self._free.insert(place, handle)

    def closes(self, attempt: Callable[[], bool]) -> bool:
        """Whether this attempt to close something that has pages here succeeds. If not it is made again, now and then,
        until it does: a device that refuses once would keep the pages for ever."""
        if attempt():
            return True
        if attempt not in self._unclosed:
            self._unclosed.append(attempt)
        return False

    def close_again(self) -> bool:
        """Try what could not be closed before; True if nothing of that is left."""
        self._closes_at = time.monotonic() + CLOSE_AGAIN_SECONDS
        # the last first: an arena is closed once whoever has pages in it, and failed after it, has unmapped them
        self._unclosed = [attempt for attempt in reversed(self._unclosed) if not attempt()][::-1]
        return not self._unclosed

    def trim(self) -> int:
        """Destroy the free handles of an elastic pool; returns how many. A page the driver kept stays free."""
        if self._unclosed and time.monotonic() >= self._closes_at:
            self.close_again()
        if self.is_fixed or not self._free:
            return 0
        return self._destroy_free()

    def fix(self, more: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Create `more` pages and stay with what is owned then. Raises MemoryShortage if they do not fit."""
        self.is_fixed = True
        self._fill(more, progress)

    def check(self) -> None:
        """owned = free + taken, nothing twice, and the driver knows them all. Raises AssertionError."""
        free = set(self._free)
        assert len(free) == len(self._free), "a handle is free twice"
        assert free <= self._owned, "a free handle is not owned"
        assert self._free == sorted(self._free), "the free list rises"
        usage = self._driver.usage()
        assert len(self._owned) <= usage["handles"], "an owned handle is unknown to the driver"

    def share(self) -> PagePool:
        """The pool for one user more of several, each of whom closes it."""
        self._users += 1
        return self

    def close(self) -> bool:
        """Whoever is alone, or the last to share it, destroys the free handles, of a fixed pool too. False if handles
        are still taken then: they stay with the driver."""
        self._users -= 1
        if self._users > 0:
            return True
        self.close_again()
        if self._free:
            self._destroy_free()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        return not self._owned

    def _create(self, count: int, keep_free: int) -> bool:
        if self.is_fixed:
            self.last_shortage = f"fixed pool: {count} more pages wanted, all {len(self._owned)} in use"
            return False
        if self._lock is None:
            return self._create_checked(count, keep_free)
        with self._lock.hold() as held:
            if not held:
                self.last_shortage = f"another engine held the device lock for {LOCK_DEADLINE_SECONDS:g} s"
                return False
            return self._create_checked(count, keep_free)

    def _create_checked(self, count: int, keep_free: int) -> bool:
        """The atomic part: read free memory, check, create. Nothing else of this device creates meanwhile."""
        nbytes = count * self.page_bytes
        free = self._driver.info().free
        if free - nbytes < keep_free:
            self.last_shortage = f"free memory: {nbytes} bytes wanted, {free} free, {keep_free} of them to be kept"
            return False
        try:
            handles = self._driver.create(count)
        except VmmShortage as shortage:
            self.last_shortage = str(shortage)
            return False
        self._owned.update(handles)
        self.give(handles)
        return True

    def _destroy_free(self) -> int:
        kept = self._driver.destroy(self._free)
        destroyed = set(self._free).difference(kept)
        self._owned -= destroyed
        self._free = sorted(kept)
        return len(destroyed)

    def _fill(self, pages: int, progress: Callable[[int, int], None] | None) -> None:
        """Create `pages` in batches on a few threads: zeroing is what takes the time."""
        batches = [min(FIXED_BATCH_PAGES, pages - start) for start in range(0, pages, FIXED_BATCH_PAGES)]
        failures: list[BaseException] = []
        created: list[int] = []
        with ThreadPoolExecutor(min(FIXED_THREADS, os.cpu_count() or 1), "page-pool") as threads:
            futures = [threads.submit(self._driver.create, batch) for batch in batches]
            for future in as_completed(futures):
                if future.cancelled():
                    continue
                if error := future.exception():
                    failures.append(error)
                    for other in futures:
                        other.cancel()
                    continue
                created += future.result()
                if progress is not None:
                    progress(len(created), pages)
        self._owned.update(created)
        self._free = sorted([*self._free, *created])
        if failures:
            self._give_up(pages, len(created), failures[0])

    def _give_up(self, pages: int, created: int, failure: BaseException) -> None:
        self.close()
        if not isinstance(failure, VmmShortage):
            raise failure
        raise MemoryShortage(
            f"the fixed pool needs {pages} pages of {self.page_bytes} bytes, {created} could be created: {failure}; "
            "lower --max_memory_utilization or --max_cache_size, or set --vmm_elastic=true"
        ) from failure
