"""The operators of the cpu against the reference, and their promise that a row knows nothing of its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from paged import batch_of

from xllm_cli import _kernels
from xllm_cli.errors import DeviceError, ModelError
from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.ops import open_ops
from xllm_cli.models.ops.base import Heads, Ops
from xllm_cli.models.ops.cpu import CpuOps
from xllm_cli.models.ops.reference import ReferenceOps

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 2, 3, 5, 7, 8, 16, 17, 64, 200]
REFERENCE = ReferenceOps()
HEADS = Heads(6, 2, 32)


@pytest.fixture(params=_kernels.levels())
def cpu(request: pytest.FixtureRequest) -> CpuOps:
    """The cpu's operators at each instruction level this machine has."""
    return CpuOps(request.param, prepacked=[])


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Activations are float32, whatever the model's type: equal to 5e-6, or near zero to 2e-6 of the largest value."""
    assert actual.dtype == expected.dtype == torch.float32 and actual.shape == expected.shape
    slack = 2e-6 * float(expected.abs().max()) + 1e-30
    torch.testing.assert_close(actual, expected, rtol=5e-6, atol=slack)


# --- against the reference ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 48, 64), (7, 33, 576), (64, 1, 40), (200, 100, 96)])
def test_linear(cpu: CpuOps, dtype: torch.dtype, rows: int, columns: int, depth: int) -> None:
    x, weight = random(rows, depth), random(columns, depth, dtype=dtype, seed=1)
    bias = random(columns, seed=2)
    for ops_bias in (None, bias):
        actual = cpu.linear(x, cpu.pack_linear([weight], columns, depth, bias=ops_bias))
        expected = REFERENCE.linear(x, REFERENCE.pack_linear([weight], columns, depth, bias=ops_bias))
        assert_close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_parts_is_the_parts_side_by_side(cpu: CpuOps, dtype: torch.dtype) -> None:
    x, parts = random(5, 64), [random(n, 64, dtype=dtype, seed=n) for n in (24, 7, 17)]
    whole = cpu.linear(x, cpu.pack_linear(iter(parts), 48, 64))
    assert torch.equal(whole, torch.cat([cpu.linear(x, cpu.pack_linear([p], p.shape[0], 64)) for p in parts], 1))


def test_linear_with_prepacked_weights() -> None:
    prepacked, native = CpuOps(prepacked=[torch.float32]), CpuOps(prepacked=[])
    x, weight, bias = random(9, 64), random(48, 64, seed=1), random(48, seed=2)
    packed = prepacked.pack_linear([weight], 48, 64, bias=bias)
    assert packed.form == "onednn"
    assert_close(prepacked.linear(x, packed), native.linear(x, native.pack_linear([weight], 48, 64, bias=bias)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits(cpu: CpuOps, dtype: torch.dtype) -> None:
    x, weight = random(3, 64), random(50, 64, dtype=dtype, seed=1)
    assert_close(cpu.logits(x, cpu.pack_head(weight)), x @ weight.float().T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(cpu: CpuOps, dtype: torch.dtype) -> None:
    table, ids = random(50, 40, dtype=dtype), torch.tensor([0, 49, 17, 17, 31])
    assert torch.equal(cpu.embedding(ids, cpu.pack_embedding(table)), table[ids].float())


@pytest.mark.parametrize("width", [16, 576, 37])
def test_norms(cpu: CpuOps, width: int) -> None:
    x, residual, weight = random(5, width, seed=1), random(5, width), random(width, seed=2)
    assert_close(cpu.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    mine, theirs = residual.clone(), residual.clone()
    assert_close(cpu.add_rms_norm(x, mine, weight, 1e-5), REFERENCE.add_rms_norm(x, theirs, weight, 1e-5))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_rope(cpu: CpuOps, head_dim: int) -> None:
    heads = Heads(4, 2, head_dim)
    mine = random(6, 8 * head_dim)
    theirs, positions = mine.clone(), torch.tensor([0, 1, 5, 90, 7, 99], dtype=torch.int32)
    table = random(100, head_dim, seed=3)
    cpu.rope(mine, positions, table, heads)
    REFERENCE.rope(theirs, positions, table, heads)
    assert_close(mine, theirs)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
def test_head_rms_norm(cpu: CpuOps, head_dim: int) -> None:
    heads, mine = Heads(4, 2, head_dim), random(6, 8 * head_dim)
    theirs, q_weight, k_weight = mine.clone(), random(head_dim, seed=1), random(head_dim, seed=2)
    values = mine[:, 6 * head_dim :].clone()
    cpu.head_rms_norm(mine, q_weight, k_weight, heads, eps=1e-6)
    REFERENCE.head_rms_norm(theirs, q_weight, k_weight, heads, eps=1e-6)
    assert_close(mine, theirs)
    assert torch.equal(mine[:, 6 * head_dim :], values)


def gated(gates: torch.Tensor) -> torch.Tensor:
    return torch.stack([gates, torch.ones_like(gates)]).flatten()[None]


def test_silu_mul(cpu: CpuOps) -> None:
    gates = torch.cat([torch.linspace(-110, 110, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38])])
    expected = (gates.double() * torch.sigmoid(gates.double())).float()[None]
    torch.testing.assert_close(cpu.silu_mul(gated(gates)), expected, rtol=5e-7, atol=2e-36)


def test_gelu_mul(cpu: CpuOps) -> None:
    gates = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38, 1e20])])
    expected = torch.nn.functional.gelu(gates.double(), approximate="tanh").float()[None]
    torch.testing.assert_close(cpu.gelu_mul(gated(gates)), expected, rtol=1e-6, atol=1e-7)
    both = random(7, 2 * 37, seed=3)
    assert_close(cpu.gelu_mul(both), REFERENCE.gelu_mul(both))


# --- row invariance -----------------------------------------------------------------------------------------------


def row_operators(ops: Ops, dtype: torch.dtype) -> dict[str, tuple[int, object]]:
    """Operators on rows alone: name → (width of a row, function)."""
    weight, head = ops.pack_linear([random(72, 96, dtype=dtype)], 72, 96), ops.pack_head(random(72, 96, dtype=dtype))
    norm, residual = random(96, seed=4), random(200, 96, seed=5)
    return {
        "linear": (96, lambda x, first: ops.linear(x, weight)),
        "logits": (96, lambda x, first: ops.logits(x, head)),
        "rms_norm": (96, lambda x, first: ops.rms_norm(x, norm, 1e-5)),
        "add_rms_norm": (96, lambda x, first: ops.add_rms_norm(x, residual[first:][: len(x)].clone(), norm, 1e-5)),
        "silu_mul": (192, lambda x, first: ops.silu_mul(x)),
        "gelu_mul": (192, lambda x, first: ops.gelu_mul(x)),
        "head_rms_norm": (8 * 24, lambda x, first: head_norms(ops, x)),
    }


def head_norms(ops: Ops, x: torch.Tensor) -> torch.Tensor:
    """A copy of x whose four query heads and two key heads of 24 are normalised."""
    normed = x.clone()
    ops.head_rms_norm(normed, random(24, seed=7), random(24, seed=8), Heads(4, 2, 24), eps=1e-6)
    return normed


ROW_OPERATORS = ["linear", "logits", "rms_norm", "add_rms_norm", "silu_mul", "gelu_mul", "head_rms_norm"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROW_OPERATORS)
def test_a_row_does_not_know_its_neighbours(cpu: CpuOps, dtype: torch.dtype, name: str, threads: int) -> None:
    width, operator = row_operators(cpu, dtype)[name]
    x = random(200, width, seed=6)
    whole = operator(x, 0)
    for size in SIZES:
        for first in {0, 1, 13, 100, 200 - size} & set(range(201 - size)):
            assert torch.equal(operator(x[first : first + size].clone(), first), whole[first : first + size]), (
                size,
                first,
            )


def test_prepacked_rows_do_not_know_their_neighbours(threads: int) -> None:
    _, operator = row_operators(CpuOps(prepacked=[torch.float32]), torch.float32)["linear"]
    x = random(200, 96, seed=6)
    whole = operator(x, 0)
    for size in SIZES:
        for first in (0, 200 - size):
            assert torch.equal(operator(x[first : first + size], first), whole[first : first + size]), (size, first)


def test_threads_change_nothing() -> None:
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append([operator(random(200, w), 0) for w, operator in row_operators(CpuOps(), torch.float32).values()])
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


# --- attention ----------------------------------------------------------------------------------------------------


class Scene:
    """Sequences of (new tokens, context) in a cache whose unused slots hold `poison`."""

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        *,
        heads: Heads = HEADS,
        dtype: torch.dtype = torch.float32,
        block_size: int = 16,
        interleaved: bool = True,
        poison: float = torch.nan,
    ) -> None:
        self.heads, self.sizes, self.block_size = heads, sizes, block_size
        self.window: int | None = None
        counts = [-(-context // block_size) for _, context in sizes]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(1)).tolist()
        self.blocks = [[order.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts) + 3, heads.num_kv_heads, block_size, heads.head_dim)
        sides = torch.full((shape[0], 5, *shape[1:]), poison, dtype=dtype)  # five layers and sides; 1 and 3 are used
        self.kv = LayerKV(sides[:, 1], sides[:, 3]) if interleaved else LayerKV(*sides[:, [1, 3]].unbind(1))
        if not interleaved:
            self.kv = LayerKV(self.kv.k.contiguous(), self.kv.v.contiguous())
        self.width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        self.tokens = [random(context, self.width, seed=10 + i) for i, (_, context) in enumerate(sizes)]
        for i, (_, context) in enumerate(sizes):
            CpuOps().write_kv(self.tokens[i], self.kv, self.batch([(i, 0, context)]).slots, heads)

    def batch(self, pieces: Sequence[tuple[int, int, int]]) -> Batch:
        """Queries of sequences: (sequence, first position, end)."""
        return batch_of([(range(end - first), first, self.blocks[i]) for i, first, end in pieces], self.block_size)

    def attend(self, ops: Ops, pieces: Sequence[tuple[int, int, int]] | None = None) -> torch.Tensor:
        """The attention of those queries, by default of every sequence's new tokens."""
        if pieces is None:
            pieces = [(i, context - new, context) for i, (new, context) in enumerate(self.sizes)]
        qkv = torch.cat([self.tokens[i][first:end] for i, first, end in pieces])
        return self.attend_batch(ops, qkv, self.batch(pieces))

    def attend_batch(self, ops: Ops, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        scale = self.heads.head_dim**-0.5
        return ops.attention(qkv, self.kv, batch, self.heads, scale=scale, window=self.window)


MIXED = [(1, 1), (1, 33), (1, 700), (5, 5), (40, 72), (17, 300), (3, 128), (2, 129)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("heads", [Heads(9, 3, 64), Heads(4, 4, 16), Heads(16, 2, 128), Heads(7, 1, 48)])
def test_attention(cpu: CpuOps, dtype: torch.dtype, block_size: int, heads: Heads) -> None:
    scene = Scene(MIXED, heads=heads, dtype=dtype, block_size=block_size)
    assert_close(scene.attend(cpu), scene.attend(REFERENCE))


def test_attention_of_both_layouts_and_any_block_size_is_the_same(cpu: CpuOps) -> None:
    expected = Scene(MIXED).attend(cpu)
    for block_size in (8, 16, 24, 32, 128):
        for interleaved in (True, False):
            assert torch.equal(Scene(MIXED, block_size=block_size, interleaved=interleaved).attend(cpu), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_alone_or_in_a_batch(cpu: CpuOps, dtype: torch.dtype, threads: int) -> None:
    scene = Scene(MIXED, dtype=dtype)
    pieces = [(i, context - new, context) for i, (new, context) in enumerate(MIXED)]
    together = scene.attend(cpu)
    assert torch.equal(torch.cat([scene.attend(cpu, [piece]) for piece in pieces]), together)
    backwards = scene.attend(cpu, pieces[::-1]).split([new for new, _ in MIXED[::-1]])
    assert torch.equal(torch.cat(backwards[::-1]), together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_whole_or_in_chunks(cpu: CpuOps, dtype: torch.dtype, threads: int) -> None:
    scene = Scene([(300, 300)], dtype=dtype)
    whole = scene.attend(cpu)
    for chunk in (1, 7, 16, 64, 128):
        cuts = range(0, 300, chunk)
        assert torch.equal(torch.cat([scene.attend(cpu, [(0, i, min(i + chunk, 300))]) for i in cuts]), whole), chunk


def test_attention_with_any_number_of_threads(cpu: CpuOps) -> None:
    scene, results = Scene([(1, 1500)], heads=Heads(9, 3, 64)), []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        results.append(scene.attend(cpu))
    torch.set_num_threads(1)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_unused_memory_never_contributes(cpu: CpuOps, dtype: torch.dtype) -> None:
    results = [Scene(MIXED, dtype=dtype, poison=poison).attend(cpu) for poison in (torch.nan, torch.inf, 7.0)]
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_later_tokens_never_contribute(cpu: CpuOps) -> None:
    scene = Scene([(90, 90)])
    before = scene.attend(cpu)
    late = scene.batch([(0, 50, 90)]).slots
    scene.kv.k[late // 16, :, late % 16] = torch.nan
    scene.kv.v[late // 16, :, late % 16] = torch.nan
    after = scene.attend(cpu)
    assert torch.equal(after[:50], before[:50]) and after[50:].isnan().all()


def test_poison_is_seen_by_a_kernel_that_reads_too_far(cpu: CpuOps) -> None:
    scene = Scene([(1, 33)])
    batch = scene.batch([(0, 32, 33)])
    batch.context_lens += 1
    assert scene.attend_batch(cpu, scene.tokens[0][32:], batch).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_touches_its_slots_only(cpu: CpuOps, dtype: torch.dtype) -> None:
    scene = Scene([(1, 20)], heads=Heads(4, 2, 16), dtype=dtype)
    heads, kv = scene.heads, scene.kv
    cpu.write_kv(scene.tokens[0], kv, scene.batch([(0, 0, 20)]).slots, heads)
    assert int(kv.k.isnan().logical_not().sum()) == 20 * 2 * 16
    block, offset = scene.blocks[0][19 // 16], 19 % 16
    expected = scene.tokens[0][19].view(-1, 16)[4:].to(dtype)
    assert torch.equal(kv.k[block, :, offset], expected[:2]) and torch.equal(kv.v[block, :, offset], expected[2:])
    assert heads.num_kv_heads == 2


# --- windows ------------------------------------------------------------------------------------------------------

WINDOWS = [1, 2, 16, 31, 32, 33, 100, 128, 129, 300, 1000]  # around tiles, splits and contexts


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [HEADS, Heads(2, 1, 256)])
def test_attention_within_a_window(cpu: CpuOps, dtype: torch.dtype, window: int, heads: Heads) -> None:
    scene = Scene(MIXED, heads=heads, dtype=dtype)
    scene.window = window
    assert_close(scene.attend(cpu), scene.attend(REFERENCE))


@pytest.mark.parametrize("window", [1, 20, 150])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_within_a_window_along_every_path(cpu: CpuOps, dtype: torch.dtype, window: int, threads: int) -> None:
    scene = Scene([(300, 300), (2, 290)], dtype=dtype)
    scene.window = window
    whole = scene.attend(cpu)[:300]
    for chunk in (3, 16, 64):
        cuts = range(0, 300, chunk)
        assert torch.equal(torch.cat([scene.attend(cpu, [(0, i, min(i + chunk, 300))]) for i in cuts]), whole), chunk


@pytest.mark.parametrize("window", [1, 16, 33, 128])
def test_edges_of_a_window(cpu: CpuOps, window: int) -> None:
    """The last token sees position 200 - window and not the one before, to the bit."""
    scene = Scene([(1, 200)])
    scene.window = window
    before = scene.attend(cpu)
    for position, is_seen in ((200 - window - 1, False), (200 - window, True)):
        for side in (scene.kv.k, scene.kv.v):
            side[scene.blocks[0][position // 16], :, position % 16] = torch.nan
        assert bool(scene.attend(cpu).isnan().all()) == is_seen
        assert is_seen or torch.equal(scene.attend(cpu), before)


@pytest.mark.parametrize("window", [1, 3, 20, 40])
def test_a_token_is_read_by_those_that_see_it_only(cpu: CpuOps, window: int) -> None:
    scene = Scene([(90, 90)])
    scene.window = window
    before = scene.attend(cpu)
    slot = int(scene.batch([(0, 30, 31)]).slots)
    for side in (scene.kv.k, scene.kv.v):
        side[slot // 16, :, slot % 16] = torch.nan
    after, sees = scene.attend(cpu), torch.arange(90)
    sees = (sees >= 30) & (sees < 30 + window)
    assert after[sees].isnan().all() and torch.equal(after[~sees], before[~sees])


def test_a_window_as_long_as_the_context_is_none(cpu: CpuOps) -> None:
    scene = Scene(MIXED)
    expected = scene.attend(cpu)
    scene.window = 700
    assert torch.equal(scene.attend(cpu), expected)


# --- the rest -----------------------------------------------------------------------------------------------------


def test_there_is_one_pool_of_threads() -> None:
    CpuOps().silu_mul(random(64, 2048))
    maps = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    assert len({line.split()[-1] for line in maps if "gomp" in line or "libomp" in line or "iomp" in line}) == 1


def test_impossible_sizes_are_refused() -> None:
    kernels = _kernels.Kernels()
    with pytest.raises(ValueError, match="head_dim"):
        kernels.attention(0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 24, 16, 1, 1, 0, 1.0, 0)
    with pytest.raises(ValueError, match="window"):
        kernels.attention(0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 16, 16, 1, 1, -1, 1.0, 0)
    with pytest.raises(ValueError, match="positive"):
        kernels.linear(0, 0, 0, 0, 0, 1, 1, 0)
    with pytest.raises(ValueError, match="dtype"):
        kernels.linear(0, 0, 0, 0, 1, 1, 1, 2)
    with pytest.raises(ValueError, match="level"):
        _kernels.Kernels("v9")


def test_activations() -> None:
    assert {ops.activation_dtype(dtype) for ops in (CpuOps(), REFERENCE) for dtype in DTYPES} == {torch.float32}
    narrow, table = ReferenceOps(wide=False), random(20, 32, dtype=torch.bfloat16)
    rows = narrow.embedding(torch.tensor([3, 4]), narrow.pack_embedding(table))
    norm = narrow.rms_norm(rows, torch.ones(32), 1e-5)
    assert {x.dtype for x in (rows, norm, narrow.linear(norm, narrow.pack_head(table)))} == {torch.bfloat16}


def test_heads_the_kernels_cannot_take() -> None:
    CpuOps().check_heads(Heads(14, 2, 64))
    for heads in (Heads(4, 2, 24), Heads(4, 2, 272), Heads(66, 2, 64)):
        with pytest.raises(ModelError, match=f"{heads.num_heads} heads"):
            CpuOps().check_heads(heads)


def test_operators_are_opened_by_device() -> None:
    assert open_ops("cpu").row_invariant and not open_ops("reference").row_invariant
    with pytest.raises(DeviceError, match="cpu"):
        open_ops("abacus")
