"""Faults that users of models that sleep, wake and share a memory met, or might: each is done to real ones here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_checkpoint
from msgspec.structs import replace
from pool_models import (
    GREEDY,
    KINDS,
    MIB,
    PAGE,
    Models,
    answers,
    closing_clean,
    driver_of,
    open_llm,
    use_up_faults,
)
from pool_models import twisted as make_twisted
from test_models_pool import fork, memory_for, run_all, submit
from test_weights_home import tensors

from xllm_cli import LLM
from xllm_cli.core import Request, SamplingParams, Snapshot
from xllm_cli.engine import host
from xllm_cli.engine.room import AWAKE_SECONDS, CLAIM_SECONDS
from xllm_cli.engine.slices import Sliced
from xllm_cli.engine.slumber import Bed
from xllm_cli.errors import RequestError

QWEN3 = str(tiny_checkpoint("qwen3"))
ARCHITECTURES = ["gemma3_text", "llama", "llama_tied", "mistral", "qwen2", "qwen3"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_all_models_add_up(kind: str) -> None:
    with closing_clean(open_llm(kind)) as llm:
        llm.host.fork("second", QWEN3)
        for model in ("", "second", ""):
            llm.generate([[5] * 40], GREEDY, model=model)
            check_bands(llm.snapshot)
            assert llm.memory()["ranks"][0]["physical"] == llm.memory()["physical"]


def check_bands(snapshot: Snapshot | None) -> None:
    """What README says of /vmm: every byte of the pool is in one band."""
    assert snapshot is not None
    memory = snapshot.memory
    bands = memory.kv_live + memory.kv_cached + memory.kv_idle + memory.kv_spare + memory.weights
    assert memory.mapped == bands and memory.physical == bands + memory.free_handles + memory.parked, memory


@pytest.mark.parametrize("names", [["llama"], ["llama", "second"]], ids=["alone", "beside another"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_add_up_while_weights_are_read(kind: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "BUSY_SLICE", 0.0)
    monkeypatch.setattr(host, "IDLE_SLICE", 0.0)
    with closing_clean(open_llm(kind)) as llm:
        for name in names[1:]:
            llm.host.fork(name, QWEN3)
        newcomer = str(tiny_checkpoint("mistral"))
        joining: list[Callable[[], Sliced[Any]]] = [
            lambda: llm.host.begin_fork("newcomer", newcomer),
            lambda: llm.host.begin_update(names[-1]),
        ]
        for begin in joining:
            before, slices, seen = llm.memory()["weights"], begin(), set[int]()
            while not slices.is_done:
                check_bands(snapshot := llm.host.step().snapshot)
                seen.add(snapshot.memory.weights if snapshot else 0)
            assert max(seen) > before, "a reader sees the newcomer's weights come"
            check_bands(llm.host.step().snapshot)
            assert llm.memory()["weights"] == sum(facts["weights"] for facts in llm.memory()["models"].values())


def test_they_add_up_while_models_take_memory_from_one_another() -> None:
    names = {"": "llama", "b": "mistral", "c": "qwen2", "d": "qwen3", "e": "llama_tied"}
    with memory_for(2, auto_sleep=True, auto_wake=True) as llm:
        for name, checkpoint in list(names.items())[1:]:
            fork(llm, name, checkpoint)
        for number in range(20):
            submit(llm, f"{number}", list(names)[number % 5])
        while llm.host.has_work:
            check_bands(llm.host.step().snapshot)
            llm.host.rest()
        assert llm.close()


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with closing_clean(open_llm("elastic", tiny_checkpoint(request.param))) as llm:
        yield llm


def test_every_architecture_lies_in_pages_whole_and_survives_every_level(architecture: LLM) -> None:
    expected = answers(architecture)
    group: Any = architecture.engine._group
    arena = group.weights.weights._arena
    found = [one.data_ptr() - arena._arena.address for one in tensors(group._worker._model, set())]
    assert len(found) > 10 and all(0 <= start < arena.used for start in found)
    for bed in (Bed(2), Bed(1), Bed(1, park=True), Bed(2)):
        architecture.engine.sleep(bed)
        architecture.engine.wake()
        assert answers(architecture) == expected, bed


def test_a_running_request_goes_on_with_new_weights_and_nothing_of_the_old(tmp_path: Path) -> None:
    twisted = make_twisted(tmp_path / "twisted")
    prompt, wanted = [7, 8, 9] * 20, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with closing_clean(open_llm("elastic")) as llm:
        assert llm.host.submit(Request(request_id="long", prompt_ids=prompt, sampling=wanted)) is None
        before = tokens_of(llm, lambda got: len(got) < 8)
        llm.host.update("llama", str(twisted))
        after = tokens_of(llm, lambda _: llm.host.has_work)
    with open_llm("elastic", twisted) as llm:
        rest = replace(wanted, max_tokens=24 - len(before))
        (expected,) = llm.generate([prompt + before], rest)
    assert len(before) >= 8 and after == expected.token_ids


def tokens_of(llm: LLM, goes_on: Callable[[list[int]], bool]) -> list[int]:
    """What the only request gets while that holds."""
    got: list[int] = []
    while goes_on(got):
        got += [token for output in llm.host.step().outputs for token in output.token_ids]
    return got


def test_no_cycle_leaves_a_file_open() -> None:
    """The copy of a light sleeper's weights is a file without a name: only its descriptor tells that it is there."""
    with closing_clean(open_llm("elastic")) as llm:
        models = Models(llm)

        def cycle() -> None:
            models.fork("comes", tiny_checkpoint("qwen3"))
            for name in ("llama", "comes"):
                for bed in (Bed(1), Bed(2), Bed(1, park=True)):
                    llm.host.engine(name).sleep(bed)
                    llm.host.wake(name)
            llm.host.update("llama")
            models.remove("comes")

        cycle()
        before = open_files()
        for _ in range(3):
            cycle()
        deadline = time.monotonic() + 30
        while open_files() > before and time.monotonic() < deadline:
            time.sleep(0.05)  # the copy goes to the disk by and by, through a descriptor of its own
        assert open_files() <= before


def open_files() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_parked_pages_are_anybodys_who_needs_them() -> None:
    with memory_for(1.1) as llm:
        expected = answers(llm)
        llm.host.engine("").sleep(Bed(1, park=True))
        assert llm.memory()["parked"] > 0
        fork(llm, "other", "qwen3")
        assert (llm.memory()["parked"], llm.host.engine("").model_state) == (0, "light")
        llm.host.engine("other").sleep(Bed(1, park=True))
        llm.host.wake("")
        assert (llm.memory()["parked"], llm.host.engine("other").model_state) == (0, "light")
        assert answers(llm) == expected
        assert llm.close()


@pytest.mark.parametrize("oldest", ["", "second"])
def test_of_all_models_the_prefix_that_was_used_longest_ago_goes_first(oldest: str) -> None:
    with closing_clean(open_llm("elastic")) as llm:
        for name in ("second", "third"):
            llm.host.fork(name, QWEN3)
        newest = "second" if oldest == "" else ""
        for model in (oldest, newest):
            llm.generate([[number % 90 + 3 for number in range(400)]], GREEDY, model=model)
        llm.idle()
        before = {name: facts["kv_mapped"] for name, facts in llm.memory()["models"].items()}
        llm.host.set_limit(sum(before.values()))
        (answer,) = llm.generate([[5] * 20], GREEDY, model="third")
        after = {name: facts["kv_mapped"] for name, facts in llm.memory()["models"].items()}
        assert answer.error is None and after[oldest or "llama"] < before[oldest or "llama"]
        assert after[newest or "llama"] == before[newest or "llama"]


def test_a_model_that_was_just_woken_is_not_put_to_sleep_for_another() -> None:
    with memory_for(1.1, auto_sleep=True, auto_wake=True) as llm:
        llm.host.engine("").sleep(Bed(1))
        fork(llm, "other", "qwen3")
        now = [time.monotonic() + 100]
        for clocked in (llm.host, llm.host._room, llm.host.engine(""), llm.host.engine("other")):
            setattr(clocked, "_clock", lambda: now[0])  # noqa: B010 - of several classes
        llm.host.engine("other").sleep(Bed(1))
        llm.host.step()
        llm.host.wake("other")
        llm.host.step()
        submit(llm, "busy", "other", tokens=100)
        submit(llm, "waits", "")
        llm.host.step()
        now[0] += (CLAIM_SECONDS + AWAKE_SECONDS) / 2
        for _ in range(20):
            llm.host.step()
        assert llm.host.engine("other").model_state == "awake" and not llm.host.engine("other").gives_way
        now[0] += AWAKE_SECONDS
        for _ in range(20):
            llm.host.step()
        assert llm.host.engine("other").gives_way
        assert llm.close()


@pytest.mark.parametrize("size", [{"max_cache_size": 0, "max_memory_utilization": 0.9}, {"max_cache_size": 60 * MIB}])
def test_physical_caches_are_never_promised_more_than_there_is(size: dict[str, Any]) -> None:
    """A host's memory looks free until it is written: who sized by that would be killed for it, requests later."""
    total, refused = 256 * MIB, ("", "")
    with closing_clean(open_llm("weights alone", total=total, **size)) as llm:
        expected = answers(llm)
        for number in range(6):
            try:
                fork(llm, f"{number}", "qwen3")
            except RequestError as error:
                refused = error.code, error.message
        assert refused[0] == "model_memory_unavailable" and str(total) in refused[1]
        assert llm.memory()["physical"] <= total - llm.memory()["floor"] + PAGE
        assert answers(llm) == expected


@pytest.mark.parametrize("held_by", ["is_paused", "gives_way"])
def test_whoever_is_held_back_is_not_told_that_there_is_no_memory(held_by: str) -> None:
    with closing_clean(open_llm("elastic", memory_wait_seconds=0.05)) as llm:
        fork(llm, "other", "qwen3")
        expected = answers(llm)
        setattr(llm.engine, held_by, True)
        submit(llm, "waits", "")
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            assert llm.engine.step().outputs == []
        setattr(llm.engine, held_by, False)
        assert run_all(llm)["waits"].finish == "length"
        assert answers(llm) == expected


def test_no_model_is_put_to_sleep_for_its_own_new_weights() -> None:
    with memory_for(1.1, auto_sleep=True, auto_wake=True) as llm:
        expected = answers(llm)
        with pytest.raises(RequestError) as refused:
            llm.host.update("llama")
        assert (refused.value.status, refused.value.code) == (503, "model_memory_unavailable")
        assert llm.engine.model_state == "awake" and answers(llm) == expected


def test_a_model_is_used_until_its_last_request_has_ended() -> None:
    with memory_for(2.2, auto_sleep=True) as llm:
        fork(llm, "other", "qwen3")
        submit(llm, "long", "", tokens=40)
        submit(llm, "short", "other", tokens=2)
        assert set(run_all(llm)) == {"long", "short"}
        fork(llm, "third", "mistral")
        states = {name: facts["state"] for name, facts in llm.memory()["models"].items()}
        assert states == {"llama": "awake", "other": "light", "third": "awake"}
        assert llm.close()


def test_a_device_that_keeps_a_models_pages_is_not_asked_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    flags: dict[str, Any] = {"auto_sleep": True, "auto_wake": True, "memory_wait_seconds": 0.5}
    with closing_clean(open_llm("fixed", max_cache_size=MIB, **flags)) as llm:
        llm.host.engine("").sleep(Bed(1))
        fork(llm, "other", "qwen3")
        expected = answers(llm, "other")
        driver_of(llm).reset_counts()
        for nth in range(1, 200):
            driver_of(llm).fail("unmap", nth, False)
        began = time.monotonic()
        (answer,) = llm.generate([[1, 2, 3]], GREEDY)
        told = [message for message in caplog.messages if "cannot make room" in message]
        assert answer.error is not None and answer.error.code == "weights_memory_unavailable"
        assert 1 <= len(told) <= 2 + time.monotonic() - began, told
        assert answers(llm, "other") == expected
        use_up_faults(driver_of(llm), 200)
