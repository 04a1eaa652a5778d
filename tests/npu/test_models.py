"""Models that sleep, wake, join and change in one pool of an emulated device: whatever was done, each answers as it
did alone, its weights are the same bytes, and the device has its memory again."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ascendcl import Emulator
from pool_models import pool_of

from npu.parity import prompts_of
from npu.small_model import NUM_TENSORS, write_small_model
from xllm_cli import LLM
from xllm_cli.core import SamplingParams
from xllm_cli.engine.slumber import Bed
from xllm_cli.errors import RequestError

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("computing", "lazy")]
MIB = 1 << 20
PAGE = 2 * MIB
DRIVER_FAILED, OUT_OF_MEMORY = 507899, 207001
LIGHT, DEEP, PARK = Bed(1), Bed(2), Bed(1, park=True)
BEDS = [LIGHT, DEEP, PARK]
FLAGS = {"device": "npu", "dtype": "float32", "enable_vmm_weights": True, "max_cache_size": 32 * MIB}
KINDS: dict[str, dict[str, Any]] = {
    "elastic": {"enable_vmm_kvcache": True, "vmm_elastic": True},
    "fixed": {"enable_vmm_kvcache": True},
    "weights alone": {"vmm_elastic": True},
}
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPTS = prompts_of(2)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the same form and of other weights."""
    return write_small_model(tmp_path_factory.mktemp("models") / "other", seed=6)


Answers = dict[Path, list[list[int]]]


@pytest.fixture(scope="module")
def alone(computing: None, model: Path, other: Path) -> Answers:
    """What each checkpoint answers by itself, as ordinary tensors."""
    found = {}
    for path in (model, other):
        with LLM(path, device="npu", dtype="float32", max_cache_size=32 * MIB) as llm:
            found[path] = answers(llm)
    assert found[model] != found[other]
    return found


def answers(llm: LLM, name: str = "") -> list[list[int]]:
    found = llm.generate(PROMPTS, GREEDY, model=name)
    assert not any(answer.error for answer in found), [answer.error for answer in found]
    return [answer.token_ids for answer in found]


@contextmanager
def opened(kind: str, path: Path, **more: Any) -> Iterator[LLM]:
    """At the end all is given back: the `emulator` fixture looks."""
    llm = LLM(path, **{**FLAGS, **KINDS[kind], **more})
    try:
        yield llm
        llm.host.check()
    finally:
        closed = llm.close()
    assert closed, "a page or a view leaked"


def digest(llm: LLM, name: str = "") -> str:
    """Of all bytes of a model's weights, read on the device."""
    found = hashlib.blake2b(digest_size=16)
    weights = llm.host._find(name).loaded.weights.weights
    weights._arena.read(lambda chunk, _: found.update(chunk.cpu().numpy().data))
    return found.hexdigest()


def sleep(llm: LLM, bed: Bed, name: str = "") -> None:
    llm.host.engine(name).sleep(bed)
    assert llm.host.engine(name).model_state == bed.state
    llm.host.check()


def held(llm: LLM, emulator: Emulator) -> int:
    """Bytes of pages that the driver has of the device, spares gone."""
    llm.host.trim()
    llm.idle()
    return sum(handle["bytes"] for handle in emulator.leaks().get("handles", []))


def settle(llm: LLM) -> None:
    """Until nobody has a page to spare, torch's allocator neither."""
    torch.npu.empty_cache()
    deadline = time.monotonic() + 20
    while llm.memory()["kv_spare"] or llm.memory()["free_handles"]:
        assert time.monotonic() < deadline, llm.memory()
        llm.host.trim()
        llm.idle()


@pytest.mark.parametrize("kind", KINDS)
def test_every_bed_brings_the_same_answers_and_frees_what_it_says(
    model: Path, alone: Answers, emulator: Emulator, kind: str
) -> None:
    with opened(kind, model) as llm:
        assert answers(llm) == alone[model]
        before, weights, is_fixed = digest(llm), llm.memory()["weights"], kind == "fixed"
        awake = held(llm, emulator)
        for bed in BEDS:
            sleep(llm, bed)
            refused = llm.generate(PROMPTS[:1], GREEDY)[0].error
            assert refused is not None and refused.code == "model_sleeping"
            assert awake - held(llm, emulator) >= (0 if bed.park or is_fixed else weights)
            llm.host.wake("")
            assert digest(llm) == before and answers(llm) == alone[model], bed
        assert emulator.calls("aclrtMemcpyAsync") > 0, "copies went through pinned memory"


def test_a_fork_of_the_same_files_shares_every_page(model: Path, alone: Answers, emulator: Emulator) -> None:
    with opened("elastic", model) as llm:
        awake, weights = held(llm, emulator), llm.memory()["weights"]
        llm.host.fork("twin", str(model))
        assert answers(llm, "twin") == alone[model] and llm.memory()["weights"] == weights
        assert held(llm, emulator) - awake == NUM_TENSORS * PAGE, "its own KV, of two cached blocks, and no weights"
        sleep(llm, LIGHT)
        assert llm.memory()["weights"] == weights and answers(llm, "twin") == alone[model]
        sleep(llm, DEEP, "twin")
        assert llm.memory()["weights"] == 0, "the last name that was awake"
        for name in ("twin", ""):
            llm.host.wake(name)
            assert answers(llm, name) == alone[model] and llm.memory()["weights"] == weights


def test_other_files_join_and_weights_are_exchanged(
    model: Path, other: Path, alone: Answers, emulator: Emulator
) -> None:
    with opened("elastic", model) as llm:
        weights = llm.memory()["weights"]
        llm.host.fork("other", str(other))
        assert (answers(llm), answers(llm, "other")) == (alone[model], alone[other])
        assert llm.memory()["weights"] == 2 * weights
        llm.host.update("other", str(model))
        assert answers(llm, "other") == alone[model] and llm.memory()["weights"] == 2 * weights
        llm.host.update("", str(other))
        for bed in BEDS:
            sleep(llm, bed)
            llm.host.wake("")
            assert (answers(llm), answers(llm, "other")) == (alone[other], alone[model])
        settle(llm)
        emulator.neighbour(emulator.device()["free"])
        with pytest.raises(RequestError) as refused:
            llm.host.update("", str(model))
        emulator.neighbour(-emulator.device()["neighbour"])
        assert refused.value.status == 503 and answers(llm) == alone[other]


def test_in_a_fixed_pool_one_sleeps_for_the_other(model: Path, other: Path, alone: Answers, emulator: Emulator) -> None:
    with opened("fixed", model) as llm:
        whole, weights = held(llm, emulator), llm.memory()["weights"]
        sleep(llm, LIGHT)
        llm.host.fork("other", str(other))
        assert answers(llm, "other") == alone[other] and held(llm, emulator) == whole
        sleep(llm, PARK, "other")
        llm.host.wake("")
        assert answers(llm) == alone[model] and llm.memory()["weights"] == weights
        sleep(llm, DEEP)
        llm.host.wake("other")
        assert answers(llm, "other") == alone[other] and held(llm, emulator) == whole


def test_captured_steps_are_replayed_over_pages_that_came_back(
    model: Path, other: Path, alone: Answers, emulator: Emulator
) -> None:
    with opened("elastic", model, enable_graph=True, acl_graph_decode_batch_size_limit=2) as llm:
        assert answers(llm) == alone[model]
        for bed in BEDS:
            sleep(llm, bed)
            llm.host.wake("")
            assert answers(llm) == alone[model], bed
        llm.host.update("", str(other))
        assert answers(llm) == alone[other]


FAULTS = [
    ("aclrtSynchronizeDeviceWithTimeout", LIGHT, 1),  # the fence
    ("aclrtUnmapMem", DEEP, 1),
    ("aclrtMapMem", PARK, 2),
    ("aclrtMallocPhysical", LIGHT, 1),
    ("aclrtMemcpyAsync", LIGHT, 1),
    ("aclrtSynchronizeStreamWithTimeout", LIGHT, 1),
    ("aclrtMemcpyAsync", DEEP, 1),  # the manual loader's
    ("aclrtMallocHost", DEEP, 1),
    ("aclrtCreateStream", DEEP, 2),
    ("aclrtMallocHost", DEEP, 3),  # the new copy's: it is a file then
    ("aclrtMemcpy", LIGHT, 1),  # from the file
    ("aclrtFreeHost", DEEP, 1),  # the old copy's
    ("aclrtDestroyStream", DEEP, 1),
    ("aclrtFreeHost", DEEP, 2),  # the loader's: left until the next one
    ("aclrtDestroyStream", DEEP, 3),
]


def test_a_fault_in_a_sleep_or_a_wake_up_is_a_503_and_the_next_try_works(
    model: Path, alone: Answers, emulator: Emulator
) -> None:
    with opened("elastic", model) as llm:
        before, engine = digest(llm), llm.host.engine("")
        assert answers(llm) == alone[model]
        pinned = len(emulator.leaks()["host_blocks"])  # the copy, and what torch_npu keeps of this and earlier tests
        for function, bed, nth in FAULTS:
            emulator.reset()
            emulator.inject(function, OUT_OF_MEMORY if "Malloc" in function else DRIVER_FAILED, nth=nth)
            insist(llm, lambda bed=bed: engine.sleep(bed))
            insist(llm, lambda: llm.host.wake(""))
            assert emulator.counters()[function].injected == 1, function
            assert digest(llm) == before, (function, bed)
        sleep(llm, DEEP)
        llm.host.wake("")
        assert answers(llm) == alone[model]
        assert pool_of(llm).close_again() and len(emulator.leaks()["host_blocks"]) == pinned


def insist(llm: LLM, verb: Callable[[], object]) -> None:
    """Try twice: what was refused for the device's sake left all as it was."""
    state = llm.host.engine("").model_state
    try:
        verb()
    except RequestError as error:
        assert error.status == 503, error
        assert llm.host.engine("").model_state in (state, "parked")
        llm.host.check()
        if llm.host.engine("").model_state == state:
            verb()


def test_any_order_leaves_all_as_they_are_alone(model: Path, other: Path, alone: Answers, emulator: Emulator) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    numbers = random.Random(seed)
    with opened("elastic", model) as llm:
        of = {"": model}
        for path in (model, other):
            llm.host.fork(path.name + "-2", str(path))
            of[path.name + "-2"] = path
        for _ in range(16):
            name, path, bed = numbers.choice(list(of)), numbers.choice([model, other]), numbers.choice(BEDS)
            engine = llm.host.engine(name)
            verb = numbers.choice(["sleep", "wake", "wake", "update"])
            print(verb, name, engine.model_state)
            if verb == "sleep" and engine.model_state == "awake":
                sleep(llm, bed, name)
            elif verb == "wake" and engine.model_state != "awake":
                llm.host.wake(name)
            elif verb == "update" and engine.model_state == "awake":
                llm.host.update(name, str(path))
                of[name] = path
            elif engine.model_state == "awake":
                assert answers(llm, name) == alone[of[name]]
            llm.host.check()
        for name, path in of.items():
            if llm.host.engine(name).model_state != "awake":
                llm.host.wake(name)
            assert answers(llm, name) == alone[path]
