"""Forks and updates that cannot be: a checkpoint that is broken, of another form, gone or changed; an interrupt in the
middle. It is said with a status, and everything is as it was."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from pool_models import FLAGS, Models, answers, closing_clean, driver_of, open_llm, pool_of
from pool_models import twisted as make_twisted
from safetensors.torch import load_file, save_file

from xllm_cli import LLM
from xllm_cli.engine.slices import Sliced
from xllm_cli.engine.slumber import Bed
from xllm_cli.errors import MemoryShortage, RequestError
from xllm_cli.models.decoder import Decoder
from xllm_cli.vmm.weights import WeightArena

LLAMA, QWEN = tiny_checkpoint("llama"), tiny_checkpoint("qwen3")


@pytest.fixture
def models() -> Iterator[Models]:
    with closing_clean(open_llm("elastic")) as llm:
        made = Models(llm)
        made.fork("other", QWEN)
        yield made
        made.check_answers()


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def drop_a_tensor(folder: Path) -> None:
    change_tensors(folder, lambda tensors: [tensors.pop(name) for name in [*tensors][-1:]] and None)


def reshape_a_tensor(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
        tensors[name] = tensors[name][:-1].contiguous()

    change_tensors(folder, change)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def garble(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(os.urandom(4096))


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def index_nothing(folder: Path) -> None:
    index = {"weight_map": {name: "gone.safetensors" for name in load_file(folder / "model.safetensors")}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def garble_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def name_no_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Unheard"]}))


def change_form(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))


BREAKS = [
    drop_a_tensor, reshape_a_tensor, truncate, empty, garble, remove_weights, index_nothing, garble_config,
    name_no_architecture,
]  # fmt: skip


def broken(tmp_path: Path, damage: Callable[[Path], None]) -> Path:
    folder = tmp_path / "broken"
    shutil.copytree(LLAMA, folder)
    damage(folder)
    return folder


def code_of(call: Callable[[], object]) -> tuple[int, str]:
    with pytest.raises(RequestError) as refused:
        call()
    assert refused.value.message
    return refused.value.status, refused.value.code


@pytest.mark.parametrize("damage", BREAKS, ids=lambda damage: damage.__name__)
def test_a_broken_checkpoint_changes_nothing(models: Models, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = broken(tmp_path, damage)
    assert code_of(lambda: models.fork("broken", path)) == (400, "model_invalid")
    models.check()
    assert code_of(lambda: models.update("llama", path)) == (400, "model_invalid")
    models.check()


def test_a_folder_that_is_not_there_changes_nothing(models: Models, tmp_path: Path) -> None:
    for call in (lambda: models.fork("gone", tmp_path / "gone"), lambda: models.update("llama", tmp_path / "gone")):
        assert code_of(call) == (400, "model_invalid")


def test_weights_of_another_form_are_no_update(models: Models, tmp_path: Path) -> None:
    assert code_of(lambda: models.update("llama", QWEN)) == (400, "model_invalid")
    folder = broken(tmp_path, change_form)
    assert code_of(lambda: models.update("llama", folder)) == (400, "model_invalid")


def test_a_folder_whose_form_changed_is_no_update_of_what_came_from_it(models: Models, tmp_path: Path) -> None:
    folder = broken(tmp_path, lambda folder: None)
    models.fork("mine", folder)
    change_form(folder)
    assert code_of(lambda: models.update("mine", folder)) == (400, "model_invalid")
    models.of["mine"] = LLAMA  # the same bytes, to compare with


def test_a_folder_that_went_is_no_twin(models: Models, tmp_path: Path) -> None:
    folder = broken(tmp_path, lambda folder: None)
    models.fork("mine", folder)
    shutil.rmtree(folder)
    models.fork("mine", folder)  # it is there: nothing to do
    assert code_of(lambda: models.fork("twin", folder)) == (400, "model_invalid")
    assert code_of(lambda: models.update("mine", folder)) == (400, "model_invalid")
    models.of["mine"] = LLAMA  # the same bytes, to compare with


def test_files_that_changed_are_another_model(models: Models, tmp_path: Path) -> None:
    folder, other = broken(tmp_path, lambda folder: None), make_twisted(tmp_path / "twisted")
    models.fork("old", folder)
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    models.fork("new", folder)
    models.of.update(old=LLAMA, new=other)
    models.check_answers()


def test_a_name_is_one_model(models: Models) -> None:
    before = driver_of(models.llm).usage()
    models.fork("other", QWEN)
    assert driver_of(models.llm).usage() == before
    assert code_of(lambda: models.fork("other", LLAMA)) == (409, "model_exists")
    assert code_of(lambda: models.llm.host.update("nobody")) == (404, "model_not_found")


def test_who_sleeps_is_not_updated(models: Models) -> None:
    for bed in (Bed(1), Bed(2)):
        models.llm.engine.sleep(bed)
        assert code_of(lambda: models.llm.host.update("")) == (409, "model_sleeping")


def test_without_weights_in_pages_nothing_joins() -> None:
    flags = {name: value for name, value in FLAGS.items() if name != "enable_vmm_weights"}
    with LLM(LLAMA, **flags, enable_vmm_kvcache=True, vmm_elastic=True) as llm:
        for call in (lambda: llm.host.fork("other", str(QWEN)), lambda: llm.host.update("")):
            assert code_of(call) == (400, "vmm_weights_required")


# --- in the middle


ENDS: dict[type[BaseException], tuple[int, str] | None] = {
    KeyboardInterrupt: None,
    RuntimeError: None,
    MemoryError: (503, "model_memory_unavailable"),
    OSError: (400, "model_invalid"),
    MemoryShortage: (503, "model_memory_unavailable"),
}


def ends(call: Callable[[], object], error: type[BaseException], refused: tuple[int, str] | None = None) -> None:
    """It does, by a refusal or by the error itself."""
    if refused is not None:
        assert code_of(call) == refused
        return
    with pytest.raises(error):
        call()


def fail_from(patch: pytest.MonkeyPatch, owner: type, verb: str, nth: int, error: type[BaseException]) -> None:
    """Let the nth call raise, and all that follow."""
    original, numbers = getattr(owner, verb), count(1)

    def call(*args: Any, **more: Any) -> Any:
        if next(numbers) >= nth:
            raise error("it ends here")
        return original(*args, **more)

    patch.setattr(owner, verb, call)


@pytest.mark.parametrize("error", ENDS)
@pytest.mark.parametrize("nth", [1, 9])
@pytest.mark.parametrize("change", ["fork", "update"])
def test_what_ends_a_reading_leaves_nothing_of_it(
    models: Models, tmp_path: Path, change: str, nth: int, error: type[BaseException]
) -> None:
    path = make_twisted(tmp_path / "twisted")
    call = (lambda: models.fork("new", path)) if change == "fork" else (lambda: models.update("llama", path))
    with pytest.MonkeyPatch.context() as patch:
        fail_from(patch, WeightArena, "take", nth, error)
        ends(call, error, ENDS[error])
    models.check()
    call()


@pytest.mark.parametrize("nth", [1, 2])
def test_an_interrupt_while_it_warms_up_leaves_nothing_of_a_fork(models: Models, nth: int) -> None:
    path = tiny_checkpoint("qwen2")
    with pytest.MonkeyPatch.context() as patch:
        fail_from(patch, Decoder, "forward", nth, KeyboardInterrupt)
        ends(lambda: models.fork("new", path), KeyboardInterrupt)
    models.check()
    models.fork("new", path)


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_an_interrupt_of_one_models_step_is_no_matter_to_the_others(models: Models, nth: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail_from(patch, Decoder, "forward", nth, KeyboardInterrupt)
        ends(lambda: answers(models.llm, "other"), KeyboardInterrupt)
    assert not models.llm.host.has_work
    models.check()


@pytest.mark.parametrize("change", ["fork", "update"])
@pytest.mark.parametrize("slices", [0, 1, 5])
def test_an_end_in_the_middle_of_a_reading_leaves_nothing(tmp_path: Path, change: str, slices: int) -> None:
    llm = open_llm("elastic")
    begin_slowly(llm, change, make_twisted(tmp_path / "twisted"), slices)
    assert llm.close()
    usage = driver_of(llm).usage()
    assert (usage["handles"], usage["ranges"], usage["mapped"]) == (0, 0, 0), usage


def test_while_a_twin_of_a_deep_sleeper_takes_its_weights_the_sleeper_waits(models: Models) -> None:
    host = models.llm.host
    host.engine("other").sleep(Bed(2))
    begun = host.begin_fork("twin", str(QWEN))
    assert not begun.advance(0.0) and not begun.advance(0.0)
    woken = host.begin_wake("other")
    assert code_of(lambda: host.engine("other").sleep(Bed(2))) == (409, "model_waking")
    until_done(models.llm, begun)
    until_done(models.llm, woken)
    assert begun.result().model_id == "twin" and woken.result() is None
    models.of["twin"] = QWEN


def test_two_that_join_at_once_both_give_way(models: Models, tmp_path: Path) -> None:
    paths = {name: make_twisted(tmp_path / name) for name in ("first", "second")}
    begun = [models.llm.host.begin_fork(name, str(path)) for name, path in paths.items()]
    for _ in range(5):
        assert not begun[0].advance(0.0)
    models.of |= paths
    for each in begun:
        until_done(models.llm, each)
        assert each.result().model_id in paths


def test_an_end_calls_off_all_that_join(tmp_path: Path) -> None:
    llm = open_llm("elastic")
    for name in ("first", "second"):
        llm.host.begin_fork(name, str(make_twisted(tmp_path / name)))
    llm.idle()
    assert llm.close()
    assert (driver_of(llm).usage()["handles"], driver_of(llm).usage()["ranges"]) == (0, 0)


def begin_slowly(llm: LLM, change: str, path: Path, slices: int) -> Sliced[Any]:
    """A fork or an update, so many slices of it done; each ends at once."""
    host = llm.host
    begun: Sliced[Any] = host.begin_fork("new", str(path)) if change == "fork" else host.begin_update("", str(path))
    for _ in range(slices):
        assert not begun.advance(0.0)
    return begun


def test_a_model_put_to_sleep_while_its_update_is_read_keeps_its_weights(models: Models, tmp_path: Path) -> None:
    begun = begin_slowly(models.llm, "update", make_twisted(tmp_path / "twisted"), 3)
    models.llm.engine.sleep(Bed(1))
    until_done(models.llm, begun)
    assert code_of(begun.result) == (409, "model_sleeping")
    del begun
    pool_of(models.llm).close_again()
    models.check()


def test_a_model_may_change_in_every_way_while_another_joins(models: Models, tmp_path: Path) -> None:
    begun = begin_slowly(models.llm, "fork", make_twisted(tmp_path / "twisted"), 2)
    for bed in (Bed(1), Bed(2), Bed(1, park=True)):
        models.llm.engine.sleep(bed)
        begun.advance(0.0)
        models.llm.host.wake("")
        begun.advance(0.0)
    until_done(models.llm, begun)
    assert begun.result().model_id == "new"
    models.of["new"] = tmp_path / "twisted"


def until_done(llm: LLM, begun: Sliced[Any]) -> None:
    for _ in range(1000):
        llm.idle()
        if begun.is_done:
            return
    raise AssertionError("it goes on for ever")
