"""Several models in one LLM: what must hold of all of them together, whatever was done to them.

Owns how such an LLM is opened and looked at. `Models` remembers what every name answers alone and what its weights are.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints import tiny_checkpoint
from safetensors.torch import load_file, save_file

from xllm_cli import LLM
from xllm_cli.core import SamplingParams
from xllm_cli.engine.hosted import HostedModel
from xllm_cli.errors import RequestError
from xllm_cli.vmm.driver import FaultyDriver, VmmError, open_driver
from xllm_cli.vmm.pool import PagePool

MIB = 1 << 20
PAGE = 512 << 10
TOTAL = 512 * MIB
KINDS: dict[str, dict[str, Any]] = {
    "elastic": {"enable_vmm_kvcache": True, "vmm_elastic": True},
    "fixed": {"enable_vmm_kvcache": True},
    "weights alone": {"vmm_elastic": True},
}
FLAGS: dict[str, Any] = {
    "enable_vmm_weights": True,
    "max_cache_size": 16 * MIB,
    "dtype": "float32",
    "block_size": 16,
    "phy_page_granularity_size": PAGE,
}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[7, 8, 9] * 30, [11] * 20, [1, 2, 3]]
ATTEMPTS = 50  # more than faults are ever planned at once


def open_llm(kind: str, path: Path | None = None, *, total: int = TOTAL, **more: Any) -> LLM:
    """An LLM of the checkpoint at `path` (None: the tiny llama) on a driver of its own that fails when told to."""
    driver = FaultyDriver(open_driver("cpu", mode="4k", page_bytes=PAGE, total_bytes=total))
    return LLM(path or tiny_checkpoint("llama"), driver=driver, **{**FLAGS, **KINDS[kind], **more})


def twisted(folder: Path, model: str = "llama") -> Path:
    """A checkpoint of the same form as the tiny `model`, and of other weights."""
    shutil.copytree(tiny_checkpoint(model), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: each.roll(1).contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


class Alone(NamedTuple):
    """A checkpoint with no other beside it."""

    answers: list[list[int]]
    digest: str


@cache
def alone(path: Path) -> Alone:
    """What the checkpoint answers, and the digest of its weights."""
    with open_llm("elastic", path) as llm:
        (model,) = hosted(llm).values()
        return Alone(answers(llm), digest(model))


def answers(llm: LLM, model: str = "") -> list[list[int]]:
    """Greedy tokens of PROMPTS."""
    found = llm.generate(PROMPTS, GREEDY, model=model)
    assert not any(answer.error for answer in found), [answer.error for answer in found]
    return [answer.token_ids for answer in found]


def hosted(llm: LLM) -> dict[str, HostedModel]:
    """The host's models by name."""
    return llm.host._models


def pool_of(llm: LLM) -> PagePool:
    """The one pool of all of them."""
    pool = llm.host._joining._start.pool
    assert pool is not None
    return pool


def driver_of(llm: LLM) -> FaultyDriver:
    """The driver below that pool."""
    driver = llm.host._joining._start.driver
    assert isinstance(driver, FaultyDriver)
    return driver


def digest(model: HostedModel) -> str:
    """Of all bytes of a model's weights, which must be awake."""
    found = hashlib.blake2b(digest_size=16)
    assert model.loaded is not None
    model.loaded.weights.weights._arena.read(lambda chunk, _: found.update(chunk.numpy().data))
    return found.hexdigest()


def check(llm: LLM) -> None:
    """Every invariant, and: whatever the driver knows is owned by the pool, and in use by exactly one thing."""
    llm.host.check()
    pool, usage, models = pool_of(llm), driver_of(llm).usage(), hosted(llm).values()
    pool.check()
    shared = {id(model.loaded.weights.weights): model.loaded.weights for model in models if model.loaded is not None}
    weights = sum(each.mapped_bytes + each.parked_bytes for each in shared.values())
    taken = (pool.owned - pool.free_handles) * PAGE
    assert usage["handles"] == pool.owned, f"the driver has {usage['handles']} handles, the pool {pool.owned}"
    assert taken == weights + sum(model.kv_in_pool for model in models), f"{taken} bytes taken, weights {weights}"
    ranges = len(shared) + (len(models) if llm.memory()["models"] and _is_virtual(llm) else 0)
    assert usage["ranges"] == ranges, f"{usage['ranges']} ranges of {ranges}"
    mapped = sum(each.mapped_bytes for each in shared.values()) + sum(model.kv_in_pool for model in models)
    assert usage["mapped"] * PAGE == mapped, f"{usage['mapped']} pages mapped, {mapped} bytes known"


def _is_virtual(llm: LLM) -> bool:
    return any(model.cache.page_bytes > 1 for model in hosted(llm).values())


def use_up_faults(driver: FaultyDriver, most: int) -> None:
    """Let what was planned and did not come happen here, to nobody: no more than `most` of each verb."""
    driver.reset_counts()
    for _ in range(most):
        start = _insist(lambda: driver.reserve(PAGE))
        (handle,) = _insist(lambda: driver.create(1))
        _insist(lambda start=start, handle=handle: driver.map([(start, handle)]))
        while driver.unmap([start]):
            pass
        while driver.destroy([handle]):
            pass
        _insist(lambda start=start: driver.release(start, PAGE))


def _insist(call: Callable[[], Any]) -> Any:
    for _ in range(ATTEMPTS):
        with suppress(VmmError):
            return call()
    raise AssertionError(f"failed {ATTEMPTS} times")


@contextmanager
def closing_clean(llm: LLM) -> Iterator[LLM]:
    """At the end everything is given back, and the driver has nothing left."""
    driver = driver_of(llm)
    try:
        yield llm
    except BaseException:
        llm.close()
        raise
    check(llm)
    assert llm.close(), "a page or a view leaked"
    usage = driver.usage()
    assert (usage["handles"], usage["ranges"], usage["mapped"]) == (0, 0, 0), usage


class Models:
    """Names and the checkpoint whose weights each has."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.of = {model.name: Path(model.path) for model in hosted(llm).values()}

    def fork(self, name: str, path: Path, level: int = 0) -> None:
        """Another name; remembered only if it comes to be."""
        self.llm.host.fork(name, str(path), level)
        self.of[name] = path

    def remove(self, name: str) -> None:
        """One name less; forgotten only if it goes."""
        self.llm.host.remove(name)
        del self.of[name]

    def update(self, name: str, path: Path) -> None:
        """Other weights for a name."""
        self.llm.host.update(name, str(path))
        self.of[name] = path

    def check(self) -> None:
        """The invariants, and the weights of all who are awake, byte for byte."""
        check(self.llm)
        assert set(hosted(self.llm)) == set(self.of)
        for name, model in hosted(self.llm).items():
            assert model.loaded is not None
            if model.loaded.weights.weights.state == "awake":
                assert digest(model) == alone(self.of[name]).digest, f"the weights of {name} changed"

    def check_answers(self) -> None:
        """All answer as each does alone; who sleeps is woken for it."""
        for name, path in self.of.items():
            if self.llm.host.engine(name).model_state != "awake":
                until_done(lambda name=name: self.llm.host.wake(name))
            assert answers(self.llm, name) == alone(path).answers, name
        self.check()


def until_done(change: Any) -> None:
    """Try until it is no longer refused for want of memory; bounded."""
    for _ in range(ATTEMPTS):
        try:
            change()
            return
        except RequestError as error:
            assert error.status == 503, error
    raise AssertionError(f"refused {ATTEMPTS} times")
