"""What `xllm bench vmm` measures on: a cache over real pages as a rank has them, and the bare system calls beside it.

Owns addresses and descriptors of the floors. Knows no case and no table.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from xllm_cli.cache.blocks import BlockTable
from xllm_cli.cache.budget import Limits
from xllm_cli.cache.manager import CacheManager
from xllm_cli.core import CacheSpec, Observation, PageDelta, TensorSpec
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.driver import Driver, open_driver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.worker.kv_store import VirtualKvStore

BLOCK_SIZE = 16
MADV_POPULATE_WRITE, MADV_COLLAPSE = 23, 25
FALLOC_PUNCH = 0x02 | 0x01
MAP_FIXED, MAP_NORESERVE, PROT_NONE = 0x10, 0x4000, 0
HUGE = 2 << 20


def p50(action: Callable[[], object], times: int) -> float:
    """The median of `times` calls in microseconds: the least of five rounds, to leave out a neighbour's turn."""
    rounds = []
    for _ in range(5):
        taken = []
        for _ in range(max(1, times // 5)):
            begin = time.perf_counter_ns()
            action()
            taken.append(time.perf_counter_ns() - begin)
        rounds.append(statistics.median(taken))
    return min(rounds) / 1000


class CountingDriver:
    """A driver whose questions for free memory are counted; everything else is passed on."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.queries = 0

    def info(self) -> Any:
        self.queries += 1
        return self._driver.info()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    @property
    def calls(self) -> int:
        """Calls that change pages or mappings, so far."""
        counts = self._driver.counts()
        return sum(counts[verb] for verb in ("create", "destroy", "map", "unmap"))


class Rig:
    """One rank's cache, arena, pool and driver. `width` is bytes of a block; `device_pages` bounds what may be made."""

    def __init__(self, *, width: int, arena_pages: int, device_pages: int, spare_pages: int = 32) -> None:
        self.driver = CountingDriver(open_driver("cpu"))
        self.page_bytes = int(self.driver.info().page_bytes)
        self.total = device_pages * self.page_bytes
        driver = cast(Driver, self.driver)
        self.pool = PagePool(driver, page_bytes=self.page_bytes)
        self.arena = Arena(driver, self.pool, arena_pages * self.page_bytes)
        self.store = VirtualKvStore([self.arena], self.pool, self.page_bytes, fence=lambda: None, block_bytes=[width])
        self.cache = CacheManager(
            CacheSpec(BLOCK_SIZE, (TensorSpec("kv", width),)),
            limits=Limits(arena_bytes=arena_pages * self.page_bytes, host=False),
            page_bytes=self.page_bytes,
            prefix_seed=1024,
            spare_pages=spare_pages,
        )
        self.observe()

    def observe(self) -> None:
        owned, free = self.store.owned_bytes, self.store.free_handle_bytes
        self.cache.observe(Observation(total=self.total, free=self.total - owned, owned=owned, free_handles=free))

    def step(self, *, trim: bool = True) -> PageDelta:
        """A maintenance step, as the engine and its worker take it."""
        delta = self.cache.plan_delta(time.monotonic())
        outcome = self.store.apply(delta, 0)
        if outcome.mapped:
            self.cache.acknowledge(delta, outcome.stuck)
        else:
            self.cache.refuse(delta, outcome.stuck)
        if trim:
            self.store.trim()
        self.observe()
        return delta

    def rest(self) -> None:
        """Steps until nothing is due."""
        while (due := self.cache.next_deadline(time.monotonic())) is not None:
            time.sleep(max(0.0, due - time.monotonic()))
            self.step()

    def table(self, blocks: int) -> BlockTable:
        """A table of so many blocks, mapped."""
        table = self.cache.open()
        assert self.cache.grow(table, blocks * BLOCK_SIZE), "the machine has no room for the benchmark"
        self.step()
        return table

    def close(self) -> None:
        self.store.close()
        self.driver.close()


@contextmanager
def rig(**sizes: int) -> Iterator[Rig]:
    """A Rig that is taken down."""
    made = Rig(**sizes)
    try:
        yield made
    finally:
        made.close()


class BarePages:
    """Pages of a memory file through the C library alone: what each step costs when nobody keeps books.

    Small pages where the kernel makes no huge ones of shared memory.
    """

    def __init__(self, pages: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
        self._file = os.memfd_create("xllm-bench", os.MFD_CLOEXEC)
        os.ftruncate(self._file, pages * HUGE)
        self._size = (pages + 1) * HUGE
        self._space = self._mmap(
            None, self._size, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0
        )
        self._base = -(-self._space // HUGE) * HUGE

    def _mmap(self, *arguments: int | None) -> int:
        address = self._libc.mmap(*arguments)
        if address is None or address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return int(address)

    def create(self, page: int) -> None:
        """Give a page memory: one small page, then collapse the rest to it."""
        self.map(page, populate=False)
        self._libc.madvise(self._base + page * HUGE, 4096, MADV_POPULATE_WRITE)
        if self._libc.madvise(self._base + page * HUGE, HUGE, MADV_COLLAPSE):
            self._libc.madvise(self._base + page * HUGE, HUGE, MADV_POPULATE_WRITE)
        self.unmap(page)

    def map(self, page: int, *, populate: bool = True) -> None:
        address, shared = self._base + page * HUGE, mmap.MAP_SHARED | MAP_FIXED
        self._mmap(address, HUGE, mmap.PROT_READ | mmap.PROT_WRITE, shared, self._file, page * HUGE)
        if populate:
            self._libc.madvise(address, HUGE, MADV_POPULATE_WRITE)

    def remap(self, page: int) -> None:
        """Map and unmap."""
        self.map(page)
        self.unmap(page)

    def unmap(self, page: int, count: int = 1) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE
        self._mmap(self._base + page * HUGE, count * HUGE, PROT_NONE, flags, -1, 0)

    def destroy(self, page: int, count: int = 1) -> None:
        self._libc.fallocate(self._file, FALLOC_PUNCH, page * HUGE, count * HUGE)

    def close(self) -> None:
        self._libc.munmap(self._space, self._size)
        os.close(self._file)
