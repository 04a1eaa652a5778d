"""What counts as running out of memory: what allocators really say, made here where they are at hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from xllm_cli.worker.exhaustion import UNKNOWN_BYTES, bytes_refused

GIB = 1 << 30
FAR_TOO_MUCH = 1 << 50


def test_what_torch_says_on_the_cpu():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(FAR_TOO_MUCH, dtype=torch.uint8)
    assert bytes_refused(caught.value) == FAR_TOO_MUCH


def test_what_numpy_says():
    with pytest.raises(MemoryError) as caught:
        np.ones(FAR_TOO_MUCH, dtype=np.uint8)
    assert bytes_refused(caught.value) == FAR_TOO_MUCH


@pytest.mark.parametrize(
    ("error", "nbytes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total …"), 5 * GIB // 2),
        (RuntimeError("NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 60.96 GiB total)"), 20 << 20),
        (RuntimeError("aclrtMalloc failed, error code is 207001"), UNKNOWN_BYTES),
        (MemoryError(), UNKNOWN_BYTES),
        (RuntimeError("std::bad_alloc"), UNKNOWN_BYTES),
    ],
)
def test_what_other_allocators_say(error: BaseException, nbytes: int):
    assert bytes_refused(error) == nbytes


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("out of memory"),
        RuntimeError("error 2070012"),
        IndexError("allocate 3 bytes"),
    ],
)
def test_other_errors_are_not_taken_for_it(error: BaseException):
    assert bytes_refused(error) is None
