"""CPU kernels over raw addresses (`tensor.data_ptr()`); native/kernels/kernels.h has the contracts.

Import torch first: the module uses the OpenMP runtime torch has loaded. `dtype` codes: 0 float32, 1 bfloat16. Sizes
and strides count elements. What runs between kernels is float32; a `dtype` is that of a weight or a cache. Sizes that
cannot be are refused with ValueError; addresses are trusted.
"""

def levels() -> list[str]:
    """Instruction levels this machine can run, the best first."""

def pack_rows(rows: int, packed: int, first: int, num_rows: int, depth: int, dtype: int, /) -> None:
    """Copy a row-major weight [num_rows, depth] into panels of 16 output columns, from output column `first` on."""

def prefer_huge_pages(address: int, nbytes: int, /) -> None:
    """Ask the kernel for 2 MiB pages in the range, before it is touched."""

class Kernels:
    """The kernels of one instruction level, with their scratch memory: one caller at a time."""

    def __init__(self, level: str = "auto") -> None: ...
    @property
    def level(self) -> str: ...
    def linear(
        self,
        x: int,
        weight: int,
        bias: int,
        out: int,
        rows: int,
        columns: int,
        depth: int,
        dtype: int,
        /,
    ) -> None: ...
    def norm(self, x: int, residual: int, weight: int, out: int, rows: int, width: int, epsilon: float, /) -> None: ...
    def rope(
        self, x: int, positions: int, table: int, rows: int, stride: int, heads: int, head_dim: int, /
    ) -> None: ...
    def head_norm(
        self,
        x: int,
        q_weight: int,
        k_weight: int,
        rows: int,
        stride: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        epsilon: float,
        /,
    ) -> None: ...
    def silu_mul(self, x: int, out: int, rows: int, width: int, /) -> None: ...
    def gelu_mul(self, x: int, out: int, rows: int, width: int, /) -> None: ...
    def write_kv(
        self,
        keys: int,
        values: int,
        k: int,
        v: int,
        slots: int,
        rows: int,
        stride: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        block_stride: int,
        dtype: int,
        /,
    ) -> None: ...
    def attention(
        self,
        q: int,
        k: int,
        v: int,
        out: int,
        query_starts: int,
        context_lens: int,
        block_tables: int,
        requests: int,
        q_stride: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        block_stride: int,
        max_blocks: int,
        window: int,
        scale: float,
        dtype: int,
        /,
    ) -> None: ...
    def embedding(self, token_ids: int, weight: int, out: int, rows: int, width: int, dtype: int, /) -> None: ...
