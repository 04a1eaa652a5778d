"""The tests in this folder run torch_npu: only `make npu` can, elsewhere they are not collected."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from ascendcl import Emulator

collect_ignore_glob = [] if find_spec("torch_npu") else ["test_*.py"]


@pytest.fixture(scope="module")
def computing() -> Iterator[None]:
    """References in place of what CANN would compute."""
    import torch_npu  # noqa: F401 - brings torch.npu

    from npu.dispatch import install

    mode = install()
    yield
    mode.__exit__(None, None, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint."""
    from npu.small_model import write_small_model

    return write_small_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    """The one in this process, and nothing of ours left in it afterwards."""
    one = Emulator()
    one.reset()
    before = one.leaks().get("host_blocks", [])  # torch_npu keeps some
    yield one
    one.reset()
    one.neighbour(-one.device()["neighbour"])
    left = one.leaks()
    assert not left.get("handles") and not left.get("mappings") and not one.violations()
    assert left.get("host_blocks", []) == before


@pytest.fixture
def lazy(emulator: Emulator) -> Iterator[None]:
    """Queued work runs when somebody waits for it: what nobody waits for shows."""
    emulator.script("streams lazy")
    yield
    emulator.script("streams immediate")
