"""The physical KV cache behind the interface of the virtual one: all memory is there from the start.

The switch between the two is read once, where the residency is made; nothing on the hot path asks which it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xllm_cli._blocks import Widths
from xllm_cli.cache.pages import Geometry, Run
from xllm_cli.cache.residency import Residency
from xllm_cli.core import CacheSpec

GROUP_BLOCKS = 64


class AlwaysResident(Residency):
    """The physical KV cache: every block of `num_blocks` has its memory from the start, and nothing ever moves."""

    reclaims = False

    def __init__(self, spec: CacheSpec, *, num_blocks: int) -> None:
        super().__init__(spec, page_bytes=1, spare_pages=0)
        self.books = Widths([])
        self.mapped_pages = num_blocks * spec.bytes_per_block

    @property
    def geometry(self) -> Geometry:
        return Geometry(1, GROUP_BLOCKS)

    def present_runs(self, run: Run) -> list[Run]:
        return [run]

    def pages_of(self, runs: Iterable[Run]) -> int:
        return 0

    def check(self, live_runs: Sequence[Run]) -> None:
        assert not self.books.has_turned
