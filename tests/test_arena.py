"""Arenas and anonymous ranges: pages by index, views that touch nothing, ranges that outlive their views."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator

import pytest
import torch
from driver_kinds import is_accessible, open_kind

from xllm_cli.vmm.arena import DLPACK_TYPES, AnonymousRange, Arena
from xllm_cli.vmm.driver import FaultyDriver, VmmError, VmmShortage
from xllm_cli.vmm.pool import PagePool

PAGE = 4096


@pytest.fixture
def driver() -> Iterator[FaultyDriver]:
    driver = open_kind("faulty")
    assert isinstance(driver, FaultyDriver)
    yield driver
    driver.close()


@pytest.fixture
def pool(driver: FaultyDriver) -> PagePool:
    return PagePool(driver, page_bytes=PAGE)


@pytest.fixture
def arena(driver: FaultyDriver, pool: PagePool) -> Arena:
    return Arena(driver, pool, 16 * PAGE - 100)


def fill(arena: Arena, pool: PagePool, pages: list[int]) -> list[int]:
    handles = pool.take(len(pages))
    assert handles is not None
    arena.map(pages, handles)
    return handles


# --- pages ---------------------------------------------------------------------------------------------------------


def test_pages_come_and_go_by_index(arena: Arena, pool: PagePool) -> None:
    assert (arena.num_pages, arena.nbytes, arena.mapped_pages) == (16, 16 * PAGE, 0)
    handles = fill(arena, pool, [3, 9])
    assert arena.is_mapped(3) and arena.is_mapped(9) and not arena.is_mapped(4)
    assert is_accessible(arena.address + 9 * PAGE) and not is_accessible(arena.address + 4 * PAGE)
    assert arena.unmap([9, 3]) == ([handles[1], handles[0]], [])
    assert arena.mapped_pages == 0


@pytest.mark.parametrize("shortage", [True, False])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_failing_map_changes_nothing(
    arena: Arena, pool: PagePool, driver: FaultyDriver, nth: int, shortage: bool
) -> None:
    handles = pool.take(3)
    assert handles is not None
    driver.fail("map", nth, shortage)
    with pytest.raises(VmmShortage if shortage else VmmError):
        arena.map([0, 1, 5], handles)
    assert arena.mapped_pages == 0 and driver.usage()["mapped"] == 0
    arena.map([0, 1, 5], handles)
    assert arena.mapped_pages == 3


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_stuck_page_keeps_its_handle(arena: Arena, pool: PagePool, driver: FaultyDriver, nth: int) -> None:
    handles = fill(arena, pool, [2, 3, 4])
    driver.fail("unmap", nth, False)
    freed, stuck = arena.unmap([2, 3, 4])
    assert stuck == [nth + 1] and freed == [handle for i, handle in enumerate(handles, 1) if i != nth]
    assert arena.is_mapped(nth + 1) and arena.mapped_pages == 1
    assert arena.unmap(stuck) == ([handles[nth - 1]], [])


def test_why_a_page_stayed_is_in_the_log(
    arena: Arena, pool: PagePool, driver: FaultyDriver, caplog: pytest.LogCaptureFixture
) -> None:
    fill(arena, pool, [2, 3])
    driver.fail("unmap", 2, False)
    with caplog.at_level(logging.WARNING):
        arena.unmap([2, 3])
    assert "1 pages could not be unmapped, the last: unmap at 0x" in caplog.text
    assert "planned failure (code 5)" in caplog.text


def test_misuse_changes_nothing(arena: Arena, pool: PagePool) -> None:
    (handle,) = fill(arena, pool, [1])
    first, second = pool.take(2) or []
    for pages in ([1, 2], [3, 3]):
        with pytest.raises(VmmError):
            arena.map(pages, [first, second])
    with pytest.raises(ValueError, match="zip"):
        arena.map([4], [first, second])
    with pytest.raises(VmmError):
        arena.unmap([1, 2])
    assert arena.mapped_pages == 1 and arena.unmap([1]) == ([handle], [])


@pytest.mark.parametrize("page", [-1, 512])
def test_a_page_of_the_neighbouring_range_is_not_ours(driver: FaultyDriver, pool: PagePool, page: int) -> None:
    arenas = [Arena(driver, pool, 512 * PAGE) for _ in range(3)]  # 2 MiB each: the kernel puts them side by side
    handles = pool.take(1) or []
    for arena in arenas:
        with pytest.raises(IndexError, match="of an arena of 512"):
            arena.map([page], handles)
        with pytest.raises(IndexError):
            arena.unmap([page])
    assert driver.usage()["mapped"] == 0


# --- views ---------------------------------------------------------------------------------------------------------


def test_a_view_touches_nothing(driver: FaultyDriver, pool: PagePool) -> None:
    arena = Arena(driver, pool, 1 << 36)
    tensor = arena.tensor(torch.bfloat16, [1 << 20, 2, 128, 128])
    layer = tensor[5:, 1].transpose(1, 2)
    assert tensor.data_ptr() == arena.address and layer.shape == ((1 << 20) - 5, 128, 128)
    assert arena.mapped_pages == 0 and driver.memfd_bytes() == 0


def test_a_view_reads_and_writes_mapped_pages(arena: Arena, pool: PagePool) -> None:
    fill(arena, pool, [1])
    tensor = arena.tensor(torch.float32, [16, 1024])
    tensor[1] = torch.arange(1024)
    other = arena.tensor(torch.float32, [4], offset=PAGE + 40)
    assert other.tolist() == [10, 11, 12, 13]
    strided = arena.tensor(torch.float32, [3, 2], [100, 7], PAGE)
    assert strided.tolist() == [[0, 7], [100, 107], [200, 207]]


@pytest.mark.parametrize("dtype", DLPACK_TYPES, ids=str)
def test_every_type_has_a_view(arena: Arena, pool: PagePool, dtype: torch.dtype) -> None:
    fill(arena, pool, [0])
    view = arena.tensor(dtype, [8])
    view.copy_(torch.arange(8))
    assert view.dtype == dtype and view.to(torch.float32).tolist() == list(range(8))
    assert arena.tensor(torch.uint8, [8 * dtype.itemsize]).view(dtype).equal(view)


def test_views_outside_the_range_are_refused(arena: Arena) -> None:
    assert arena.tensor(torch.uint8, [16 * PAGE]).numel() == 16 * PAGE
    assert arena.tensor(torch.uint8, [0], None, 16 * PAGE).numel() == 0
    for shape, strides, offset in (
        ([16 * PAGE + 1], None, 0),
        ([2], [16 * PAGE], 0),
        ([1], None, 16 * PAGE),
        ([1], None, -1),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            arena.tensor(torch.uint8, shape, strides, offset)
    with pytest.raises(ValueError, match="do not fit"):
        arena.tensor(torch.float32, [1], offset=2)
    with pytest.raises(ValueError, match="do not describe a view"):
        arena.tensor(torch.uint8, [2, 2], [1])
    with pytest.raises(ValueError, match="no view of type"):
        arena.tensor(torch.complex64, [1])


# --- closing -------------------------------------------------------------------------------------------------------


def test_a_range_outlives_its_views(arena: Arena, driver: FaultyDriver, caplog: pytest.LogCaptureFixture) -> None:
    view = arena.tensor(torch.float32, [100])[3:9].view(2, 3)
    gc.collect()
    assert arena.num_views == 1
    with caplog.at_level(logging.WARNING):
        assert arena.close() is False
    assert "0 pages mapped, 1 views alive" in caplog.text and driver.usage()["ranges"] == 1
    del view
    assert arena.num_views == 0 and arena.close() is True
    assert driver.usage()["ranges"] == 0 and arena.close() is True


def test_a_range_outlives_its_pages_and_a_refusing_driver(arena: Arena, pool: PagePool, driver: FaultyDriver) -> None:
    fill(arena, pool, [7])
    assert arena.close() is False
    arena.unmap([7])
    driver.fail("release", 1, False)
    assert arena.close() is False and driver.usage()["ranges"] == 1
    assert arena.close() is True
    with pytest.raises(ValueError, match="closed"):
        arena.tensor(torch.uint8, [1])


def test_views_die_on_any_thread(arena: Arena) -> None:
    views = [arena.tensor(torch.uint8, [10]) for _ in range(200)]
    assert arena.num_views == 200
    threads = [threading.Thread(target=lambda: [views.pop() for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert arena.num_views == 0 and arena.close()


def test_an_arena_that_is_forgotten_leaves_its_views_safe(driver: FaultyDriver, pool: PagePool) -> None:
    arena = Arena(driver, pool, PAGE)
    fill(arena, pool, [0])
    view = arena.tensor(torch.uint8, [PAGE])
    del arena
    gc.collect()
    view.fill_(7)
    assert view.sum().item() == 7 * PAGE
    driver.close()
    assert not is_accessible(view.data_ptr()), "without memory, yet nobody else's"


def test_no_address_space_is_a_shortage(driver: FaultyDriver, pool: PagePool) -> None:
    driver.fail("reserve", 1, True)
    with pytest.raises(VmmShortage):
        Arena(driver, pool, PAGE)
    with pytest.raises(VmmShortage, match="address space"):
        Arena(driver, pool, 1 << 60)
    assert driver.usage()["ranges"] == 0


def test_anonymous_memory_is_touched_by_use() -> None:
    memory = AnonymousRange(1 << 38)
    view = memory.tensor(torch.bfloat16, [1 << 37])
    view[1 << 36] = 5
    assert view[(1 << 36) - 1 : (1 << 36) + 2].tolist() == [0, 5, 0]
    assert memory.address % (2 << 20) == 0
    assert memory.close() is False and is_accessible(memory.address)
    address = memory.address
    del view
    assert memory.close() is True and memory.close() is True and not is_accessible(address)


def test_too_much_anonymous_memory_is_a_shortage() -> None:
    with pytest.raises(VmmShortage, match="anonymous memory"):
        AnonymousRange(1 << 60)
