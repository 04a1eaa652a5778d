"""torch.npu's graphs without a device: capturing writes down the calls, a replay makes them again on the same memory.

As on a device, a call's tensors keep their addresses, what is on the host at capture time is frozen in, host lengths of
attention are rebound by update(), and work that would have to wait for the device cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UPDATABLE = "npu_fused_infer_attention_score"
# from the device to the host: a capture has nothing to answer with
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}
_EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


@cache
def may_copy(func: Any) -> bool:
    """Whether an operator is a view or a copy as it comes (contiguous, reshape): only its parts tell."""
    return bool(func.is_view) and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )


class CaptureError(RuntimeError):
    """Something that a capture refuses (codes 107027 to 107030 of the vendor's runtime)."""


@dataclass(slots=True)
class Call:
    """One captured call and the tensors its results went to."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Any]

    def run(self) -> None:
        """Make the call; what it returns goes where it went at capture."""
        found = tree_leaves(self.function(*self.args, **self.kwargs))
        for mine, new in zip(self.results, found, strict=True):
            if isinstance(mine, torch.Tensor) and mine is not new:
                mine.copy_(new)


class Recorder(TorchDispatchMode):
    """Runs every call and writes it down, but for those that only look at memory or ask for some."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        if name in _WAITS:
            raise CaptureError(f"{name} waits for the device, which only captures")
        if may_copy(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if not (func.is_view or name in _EMPTY):
            self.calls.append(Call(func, args, kwargs, tree_leaves(result)))
        return result


class EmulatedGraph:
    """See torch.npu.NPUGraph."""

    def __init__(self) -> None:
        self.calls: list[Call] | None = None
        self.updatable = False
        self.replays = 0

    def update(self, cpu_update_input: list[dict[str, list[int]]]) -> None:
        """Rebind host arguments; refused, as the vendor does, without auto_dispatch_capture or for a wrong count."""
        calls = [call for call in self._captured() if call.function.overloadpacket.__name__ == UPDATABLE]
        if not self.updatable:
            raise RuntimeError("capture with auto_dispatch_capture=True to update")
        inputs = cpu_update_input * len(calls) if len(cpu_update_input) == 1 else cpu_update_input
        for call, changed in zip(calls, inputs, strict=True):
            call.kwargs.update({name: value for name, value in changed.items() if name in call.kwargs})

    def replay(self) -> None:
        """Run everything again."""
        self.replays += 1
        for call in self._captured():
            call.run()

    def reset(self) -> None:
        """Forget the calls and let go of their tensors."""
        self.calls = None

    def _captured(self) -> list[Call]:
        if self.calls is None:
            raise RuntimeError("nothing was captured")
        return self.calls


class EmulatedGraphs:
    """The part of torch.npu that captures."""

    NPUGraph = EmulatedGraph

    @staticmethod
    def graph_pool_handle() -> tuple[int, int]:
        """A token; memory is not pooled here."""
        return (0, 1)

    @staticmethod
    @contextmanager
    def graph(npu_graph: EmulatedGraph, *, pool: Any = None, auto_dispatch_capture: bool = False) -> Iterator[None]:
        """Capture what runs inside."""
        with Recorder() as recorder:
            yield
        npu_graph.calls, npu_graph.updatable = recorder.calls, auto_dispatch_capture
