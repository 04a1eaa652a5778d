"""A model's parameters between awake and asleep: what refuses leaves a state that is true and can be left again."""

from __future__ import annotations

import pwd
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from xllm_cli.errors import MemoryShortage, ModelError
from xllm_cli.vmm.driver import FaultyDriver, open_driver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.vmm.weights import WeightArena
from xllm_cli.worker.backup import FileBackup
from xllm_cli.worker.weights import Refill, Weights, WeightsError

PAGE = 4096
SHAPES = [[3000], [20, 100], [7]]


class Model:
    """A few parameters, each of its own number; `reload` is what the next reading of the checkpoint does."""

    def __init__(self, *, with_copy: bool) -> None:
        self.driver = FaultyDriver(open_driver("cpu", page_bytes=PAGE))
        self.pool = PagePool(self.driver, page_bytes=PAGE)
        self.arena = WeightArena(self.driver, self.pool, 64 * PAGE)
        self.tensors = read(self.arena)
        self.reload: Callable[[Refill], object] = read
        copies = [lambda nbytes: FileBackup()] if with_copy else []
        self.weights = Weights(self.arena, self.pool, reload=lambda memory: self.reload(memory), copies=copies)

    def check(self) -> None:
        self.weights.check()
        if self.weights.state == "awake":
            assert all(bool((tensor == number).all()) for number, tensor in enumerate(self.tensors))


def read(memory: WeightArena | Refill, shapes: Sequence[Sequence[int]] = SHAPES) -> list[torch.Tensor]:
    tensors = [memory.take(shape, torch.float32) for shape in shapes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    return tensors


@pytest.fixture(params=[True, False], ids=["copy", "no copy"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    made = Model(with_copy=request.param)
    yield made
    made.check()
    made.tensors.clear()
    assert made.weights.close()
    made.pool.close()
    assert made.driver.usage()["handles"] == 0


@pytest.mark.parametrize("level", [1, 2])
def test_pages_that_neither_leave_nor_come_back_are_set_aside_and_woken(model: Model, level: int) -> None:
    model.driver.reset_counts()
    model.driver.fail("unmap", 1, False)
    model.driver.fail("map", 1, False)
    with pytest.raises(WeightsError):
        model.weights.sleep(level)
    assert model.weights.state == "parked", "a row would touch pages that are not there"
    model.check()
    assert model.weights.wake() == ""
    model.check()


def refuse(error: BaseException) -> Callable[[Refill], object]:
    def reload(memory: Refill) -> object:
        raise error

    return reload


SHORT = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")


@pytest.mark.parametrize("error", [SHORT, MemoryError(), MemoryShortage("none"), ModelError("gone"), OSError("disk")])
def test_a_checkpoint_that_cannot_be_read_now_can_be_later(model: Model, error: BaseException) -> None:
    model.weights.sleep(2)
    model.reload = refuse(error)
    with pytest.raises(WeightsError):
        model.weights.wake()
    assert model.weights.state == "deep" and model.pool.owned == 0
    model.reload = read
    assert model.weights.wake() == ""


def test_a_broken_model_file_is_no_refusal(model: Model) -> None:
    model.weights.sleep(2)
    model.reload = refuse(RuntimeError("the kernel is wrong"))
    with pytest.raises(RuntimeError):
        model.weights.wake()
    model.check()


@pytest.mark.parametrize("shapes", [SHAPES[:2], [*SHAPES, [1]], [[3000], [100, 20], [7]], [[2999], [20, 100], [7]]])
def test_another_checkpoint_in_its_place_is_refused(model: Model, shapes: list[list[int]]) -> None:
    model.weights.sleep(2)
    model.reload = lambda memory: read(memory, shapes)
    with pytest.raises(WeightsError, match="not the one that was loaded"):
        model.weights.wake()
    assert model.weights.state == "deep"


def test_pages_kept_after_a_reading_that_failed_are_given_back_by_the_next_wake(model: Model) -> None:
    model.weights.sleep(2)

    def reload(memory: Refill) -> object:
        model.driver.reset_counts()
        model.driver.fail("unmap", 1, False)
        raise OSError("disk")

    model.reload = reload
    with pytest.raises(WeightsError):
        model.weights.wake()
    model.reload = read
    assert model.weights.wake() == ""
    model.check()


def test_a_user_without_a_home_has_no_copy_and_wakes_from_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    model = Model(with_copy=True)
    model.weights.sleep(1)
    assert model.weights.wake() == ""
    model.check()
