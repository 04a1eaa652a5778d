"""A memory cgroup for the processes of a test, which is skipped, loudly, where none can be made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from xllm_cli.bench.memory_group import MemoryGroup, NoMemoryGroup, memory_group


@contextmanager
def memory_cgroup(nbytes: int) -> Iterator[MemoryGroup]:
    """A group limited to `nbytes`."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(memory_group())
            made.limit(nbytes)
        except (NoMemoryGroup, OSError) as error:
            pytest.skip(f"needs a memory cgroup: {error}")
        yield made
