"""How long a random test goes on: until it has seen what it is for, whatever the seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator


def steps_until(covered: Callable[[], bool], *, least: int, most: int) -> Iterator[int]:
    """Number the steps: at least `least` of them, and more until `covered()`; AssertionError if `most` are not enough.

    `most` is so large that only an event that has become impossible, not a rare seed, reaches it.
    """
    for step in range(most):
        if step >= least and covered():
            return
        yield step
    assert covered(), f"{most} steps, and it has not seen all"
