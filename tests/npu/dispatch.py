"""Makes operators run on an emulated device: its memory is the host's, so the processor computes on it in place.

call on npu tensors ─┬─ only looks, or asks for memory ───► torch_npu itself
                     ├─ copies between host and device ───► torch_npu itself: aclrtMemcpy, checked there
                     ├─ an npu_* operator ────────────────► References
                     └─ all else ─────────────────────────► torch's kernel of the cpu, on aliases
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from npu.graphs import EmulatedGraphs, may_copy
from npu.operators import FLOATS, References

GRAPH_NAMES = ("NPUGraph", "graph", "graph_pool_handle")
_MAKES_MEMORY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


def is_there(value: object) -> bool:
    """Whether it is a tensor on the device."""
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def each(function: Callable[[Any], Any], value: Any) -> Any:
    """Of a value, or of the elements of a list of them: operators have no deeper arguments and results."""
    return type(value)(map(function, value)) if type(value) in (list, tuple) else function(value)


def alias(value: torch.Tensor) -> torch.Tensor:
    """The same memory as a cpu tensor. Nothing is touched: most of a KV tensor may be unmapped."""
    storage = value.untyped_storage()
    if value.numel() == 0:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=value.dtype).set_(flat, value.storage_offset(), value.shape, value.stride())


def brought(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A kernel's result in new memory of the device, as a kernel would leave it there: no copy of the runtime's."""
    there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    alias(there).copy_(value)
    return there


class ComputeOnHost(TorchDispatchMode):
    """The table above, for the thread that enters it. `vendor_graphs` are torch.npu's own, which install() replaces."""

    def __init__(self, references: References) -> None:
        super().__init__()
        self.references = references
        self.vendor_graphs = SimpleNamespace(**{name: getattr(torch.npu, name) for name in GRAPH_NAMES})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        device = _device_of(args, kwargs)
        if device is not None and may_copy(func):
            with self:
                return func.decompose(*args, **kwargs)
        if device is None or func.is_view or name in _MAKES_MEMORY:
            return func(*args, **kwargs)
        if name == "_to_copy":
            return _converted(args[0], kwargs)
        if name == "copy_" and is_there(args[0]) != is_there(args[1]):
            return _copied(*args)
        return self._compute(func, args, kwargs, device=device)

    def _compute(self, func: Any, args: Any, kwargs: Any, *, device: torch.device) -> Any:
        """On aliases; results that are no argument's memory move to the device."""
        originals: dict[int, torch.Tensor] = {}

        def swap(value: Any) -> Any:
            if not is_there(value):
                return value
            twin = alias(value)
            originals[id(twin)] = value
            return twin

        args = tuple(each(swap, value) for value in args)
        kwargs = {key: each(swap, value) for key, value in kwargs.items()}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        if func.namespace == "npu":
            found = self.references.run(func.overloadpacket.__name__, *args, **kwargs)
        else:
            found = func(*args, **kwargs)

        def back(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return originals[id(value)] if id(value) in originals else brought(value, device)

        return each(back, found)


def _device_of(args: Any, kwargs: dict[str, Any]) -> torch.device | None:
    """The npu that a call is about, if any."""
    asked = kwargs.get("device")
    if asked is not None and torch.device(asked).type == "npu":
        return torch.device(asked)
    for value in (*args, *kwargs.values()):
        for one in value if isinstance(value, list | tuple) else (value,):
            if is_there(one):
                return one.device
    return None


def _converted(source: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """aten::_to_copy: the type changes on the host, bytes cross as they are."""
    wanted = torch.device(options.get("device") or source.device)
    dtype = options.get("dtype") or source.dtype
    if is_there(source) and wanted.type == "cpu" and source.is_contiguous():
        return source.cpu().to(dtype)
    here = (alias(source) if is_there(source) else source).to(dtype, copy=True)
    if options.get("memory_format") == torch.contiguous_format:
        here = here.contiguous()
    return here.to(wanted) if wanted.type == "npu" else here


def _copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """aten::copy_ between host and device: whole pieces as they are, others in place."""
    if is_there(target) and target.is_contiguous():
        return target.copy_(source.to(target.dtype).expand(target.shape).contiguous())
    if is_there(target):
        alias(target).copy_(source)
        return target
    return target.copy_(source.cpu() if source.is_contiguous() else alias(source))


def install(references: References | None = None) -> ComputeOnHost:
    """From now on this thread computes so, and captures graphs by writing down their calls. torch_npu is loaded.

    Attention takes float32 too, so that tokens can be compared exactly with the cpu's; leave it by `__exit__`.
    """
    mode = ComputeOnHost(references or References(attention_dtypes=FLOATS))
    mode.__enter__()
    for name in GRAPH_NAMES:
        setattr(torch.npu, name, getattr(EmulatedGraphs, name))
    return mode
