"""Copies of weights on the host, pinned (on the emulated Ascend runtime), in a file, or none, whatever call fails."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from acl_emulation import DRIVER_FAILED, OUT_OF_MEMORY, PAGE, clean_emulator
from ascendcl import Emulator
from driver_kinds import acl_library, open_kind

from xllm_cli.errors import DeviceError, MemoryShortage
from xllm_cli.vmm import weights as arenas
from xllm_cli.vmm.pool import PagePool
from xllm_cli.vmm.weights import WeightArena
from xllm_cli.worker.backup import Backup, FileBackup, PinnedBackup
from xllm_cli.worker.npu_copies import AclCopies
from xllm_cli.worker.weights import Refill, Weights, WeightsError

CHUNK_PAGES = 1
SIZES = [CHUNK_PAGES * PAGE // 4, 5, 300]  # floats: two chunks, the second not a whole one
CODES = [OUT_OF_MEMORY, DRIVER_FAILED]
COPYING = (
    "aclrtSetDevice", "aclrtMallocHost", "aclrtFreeHost", "aclrtCreateStream", "aclrtDestroyStream", "aclrtMemcpyAsync",
    "aclrtSynchronizeStreamWithTimeout", "aclrtSynchronizeDevice",
)  # fmt: skip
PAGES = ("aclrtMallocPhysical", "aclrtFreePhysical", "aclrtMapMem", "aclrtUnmapMem")
ATTEMPTS = 20


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    monkeypatch.setattr(arenas, "FILL_PAGES", CHUNK_PAGES)
    with clean_emulator() as emulator:
        open_kind("acl").close()  # the device has a stream of its own from then on
        streams = emulator.report()["live"]["streams"]
        yield emulator
        emulator.script("streams immediate")
        assert not emulator.leaks().get("host_blocks") and emulator.report()["live"]["streams"] == streams


def parameters() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(n, generator=draw) for n in SIZES]


class Model:
    """Parameters in memory of the emulated device, which tensors here name by their addresses; `folder` for files."""

    def __init__(self, emulator: Emulator, folder: Path, free: int = 1 << 40) -> None:
        self.emulator = emulator
        self.driver = open_kind("acl")
        self.pool = PagePool(self.driver, page_bytes=PAGE)
        self.copies, self.free = AclCopies(0, str(acl_library())), free
        self.arena = WeightArena(self.driver, self.pool, 64 * PAGE, fence=self.fence)
        self.arena._is_host = False  # filled as a device's memory is
        self.tensors = self.read(self.arena)
        kinds: list[Callable[[int], Backup]] = [self.pinned, lambda nbytes: FileBackup(folder)]
        self.weights = Weights(self.arena, self.pool, reload=lambda memory: self.read(memory), copies=kinds)

    def pinned(self, nbytes: int) -> PinnedBackup:
        return PinnedBackup(self.copies, nbytes, free=self.free, fence=self.fence)

    def fence(self) -> None:
        """Of the whole device, as torch_npu's, and with its kind of error."""
        self.copies.call("aclrtSetDevice", 0)
        if (code := self.emulator.library.aclrtSynchronizeDevice()) != 0:
            raise DeviceError(f"aclrtSynchronizeDevice: {code}")

    def read(self, memory: WeightArena | Refill) -> list[torch.Tensor]:
        return [memory.take(each.shape, each.dtype).copy_(each) for each in parameters()]

    def check(self) -> None:
        self.weights.check()
        self.pool.check()
        if self.weights.state == "awake":
            assert all(map(torch.equal, self.tensors, parameters()))

    @property
    def place(self) -> str:
        return self.weights._backup.place if self.weights._backup else ""

    def until_done(self, verb: Callable[[], object]) -> int:
        """Try until it works; how often it did not."""
        for failures in range(ATTEMPTS):
            try:
                if not verb():
                    return failures
            except WeightsError:
                pass
            self.check()
        raise AssertionError(f"failed {ATTEMPTS} times")

    def wake(self) -> object:
        return None if self.weights.state == "awake" else self.weights.wake()

    def cycle(self) -> int:
        """Every way to sleep and back; how often a verb failed."""
        failures = 0
        sleeps: list[Callable[[], None]] = [lambda: self.weights.sleep(1), lambda: self.weights.sleep(2)]
        for sleep in [*sleeps, self.weights.park, sleeps[0]]:
            failures += self.until_done(sleep)
            failures += self.until_done(self.wake)
            self.check()
        return failures

    def renew(self) -> None:
        """Awake with the best copy there can be, whatever there was before."""
        self.until_done(lambda: self.weights.sleep(2))
        self.until_done(self.wake)
        assert self.place == "pinned host memory"

    def close(self) -> None:
        self.tensors.clear()
        assert self.weights.close() or self.pool.close_again()
        self.pool.close()
        self.driver.close()


@pytest.fixture
def model(emulator: Emulator, tmp_path: Path) -> Iterator[Model]:
    made = Model(emulator, tmp_path)
    yield made
    made.check()
    made.close()


def test_asleep_a_copy_is_pinned_and_the_device_has_its_memory_again(model: Model, emulator: Emulator) -> None:
    used, host = emulator.device()["used"], emulator.leaks()["host_blocks"]
    assert sum(block["bytes"] for block in host) == model.arena.used, "the bytes themselves, and nothing rounded up"
    model.weights.sleep(1)
    assert emulator.device()["used"] == used - model.weights.nbytes and emulator.leaks()["host_blocks"] == host
    assert model.weights.wake() == ""
    model.check()
    model.weights.sleep(2)
    assert not emulator.leaks().get("host_blocks"), "a deep sleep keeps nothing"
    assert model.weights.wake() == "" and model.place == "pinned host memory"


def test_a_wake_up_hands_all_chunks_over_and_waits_once(model: Model, emulator: Emulator) -> None:
    model.weights.sleep(1)
    emulator.reset()
    emulator.script("streams lazy")
    assert model.weights.wake() == ""
    model.check()
    copies = emulator.calls("aclrtMemcpyAsync")
    assert (copies, emulator.calls("aclrtSynchronizeStreamWithTimeout"), emulator.calls("aclrtMemcpy")) == (2, 1, 0)
    assert emulator.calls("aclrtMallocHost") == 0, "nothing is needed besides"


def test_pages_that_are_short_halfway_leave_no_copy_under_way(model: Model, emulator: Emulator) -> None:
    model.weights.sleep(1)
    emulator.script("streams lazy")
    emulator.inject("aclrtMallocPhysical", OUT_OF_MEMORY, nth=CHUNK_PAGES + 1)
    assert "aclrtMallocPhysical" in model.weights.wake()
    assert model.weights.state == "light" and emulator.report()["live"]["pending"] == 0
    model.check()
    assert model.weights.wake() == ""


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("function", COPYING + PAGES)
def test_whatever_call_fails_in_a_cycle_it_is_retried_to_the_same_bytes(
    model: Model, emulator: Emulator, function: str, code: int
) -> None:
    emulator.reset()
    assert model.cycle() == 0
    calls = emulator.calls(function)
    assert calls >= 1
    for nth in range(1, calls + 1):
        emulator.reset()
        emulator.inject(function, code, nth=nth)
        model.cycle()
        assert emulator.counters()[function].injected == 1
        model.renew()
    emulator.reset()
    assert model.cycle() == 0


def test_random_faults_in_random_orders_keep_the_books(model: Model, emulator: Emulator) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    numbers = random.Random(seed)
    for _ in range(150):
        emulator.reset()
        emulator.script(f"streams {numbers.choice(['lazy', 'immediate'])}")
        for function in numbers.sample(COPYING + PAGES, numbers.randrange(4)):
            emulator.inject(function, numbers.choice(CODES), nth=numbers.randrange(1, 4), count=numbers.randrange(1, 3))
        with suppress(WeightsError):
            step(model, numbers)
        model.check()
    emulator.reset()
    model.until_done(model.wake)
    model.check()


def step(model: Model, numbers: random.Random) -> None:
    match model.weights.state:
        case "awake":
            numbers.choice([model.weights.park, lambda: model.weights.sleep(1), lambda: model.weights.sleep(2)])()
        case "light" | "parked" if numbers.random() < 0.2:
            model.weights.sleep(2)
        case _:
            model.weights.wake()


def test_without_pinned_memory_the_copy_is_a_file_and_a_warning_says_so(
    emulator: Emulator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = Model(emulator, tmp_path, free=1000)
    assert model.place == "a file" and not emulator.leaks().get("host_blocks")
    said = [(record.levelname, record.message) for record in caplog.records]
    assert said[0][0] == "WARNING" and "the host has 1000 to give; another kind is tried" in said[0][1]
    assert said[1][0] == "INFO" and f"{model.arena.used} bytes, is in a file" in said[1][1]
    assert model.cycle() == 0
    model.close()


def test_pinned_memory_that_ends_halfway_is_given_back_for_the_file(emulator: Emulator, tmp_path: Path) -> None:
    emulator.inject("aclrtMallocHost", OUT_OF_MEMORY, nth=2)
    model = Model(emulator, tmp_path)
    assert model.place == "a file" and not emulator.leaks().get("host_blocks")
    assert model.cycle() == 0
    model.close()


def test_without_any_copy_a_light_sleep_wakes_from_the_checkpoint(
    emulator: Emulator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").touch()
    model = Model(emulator, tmp_path / "taken", free=0)
    assert model.place == "" and "wakes by reading the checkpoint again" in caplog.records[-1].message
    assert model.cycle() == 0
    model.close()


def test_a_pinned_backup_of_more_than_the_host_has_is_not_begun(emulator: Emulator) -> None:
    copies = AclCopies(0, str(acl_library()))
    with pytest.raises(MemoryShortage, match="9 bytes of pinned memory wanted, the host has 8 to give"):
        PinnedBackup(copies, 9, free=8, fence=lambda: None)
    assert emulator.calls("aclrtCreateStream") == 0


@pytest.mark.parametrize("function", ["aclrtSynchronizeDevice", "aclrtUnmapMem", "aclrtDestroyStream", "aclrtFreeHost"])
def test_what_is_refused_at_the_end_is_given_back_later(emulator: Emulator, tmp_path: Path, function: str) -> None:
    model = Model(emulator, tmp_path)
    emulator.inject(function, DRIVER_FAILED)
    model.tensors.clear()
    assert not model.weights.close() and model.pool.close_again()
    model.close()
