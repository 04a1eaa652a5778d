"""The npu's operators against the reference, the vendor's operators replaced by references that check their contracts.

What this shows: every call is one that the real operator takes, and means what it should. What it does not: how the
vendor's kernels round, or that they keep their documentation.
"""

from __future__ import annotations

import pytest
import torch
from checkpoints import tiny_checkpoint
from model_runs import answers, build, run
from npu.operators import FLOATS, References
from paged import batch_of, poisoned_kv

from xllm_cli.errors import ModelError
from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.ops.base import Heads
from xllm_cli.models.ops.npu import NpuOps
from xllm_cli.models.ops.reference import ReferenceOps

DTYPES = [torch.float32, torch.bfloat16]
HEADS = Heads(6, 2, 32)
NARROW = ReferenceOps(wide=False)
NAMES = ["llama", "llama_tied", "mistral", "qwen2", "qwen3", "gemma3_text"]


@pytest.fixture
def references() -> References:
    return References(attention_dtypes=FLOATS)


@pytest.fixture
def ops(references: References) -> NpuOps:
    """The npu's operators on cpu tensors, float32 allowed so that results can be compared closely."""
    return NpuOps(operators=references)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of float32 sums, or one rounding to bfloat16."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    rtol = 5e-6 if actual.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * float(expected.float().abs().max()))


# --- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_parts_with_a_bias(ops: NpuOps, dtype: torch.dtype) -> None:
    x, parts = random(5, 64, dtype=dtype), [random(n, 64, dtype=dtype, seed=n) for n in (24, 7, 17)]
    bias = random(48, seed=9).to(dtype).float()
    packed = ops.pack_linear(iter(parts), 48, 64, bias=bias)
    assert_close(ops.linear(x, packed), NARROW.linear(x, NARROW.pack_linear(parts, 48, 64, bias=bias)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_never_rounded(ops: NpuOps, dtype: torch.dtype) -> None:
    x, weight = random(3, 64, dtype=dtype), random(50, 64, dtype=dtype, seed=1)
    expected = x.float() @ weight.float().T
    for head in (ops.pack_head(weight), ops.pack_embedding(weight)):
        assert_close(ops.logits(x, head), expected)
    assert not torch.equal(expected.bfloat16().float(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_head", [False, True])
def test_embedding(ops: NpuOps, dtype: torch.dtype, is_head: bool) -> None:
    table, ids = random(50, 40, dtype=dtype), torch.tensor([0, 49, 17, 17, 31])
    rows = ops.embedding(ids, ops.pack_embedding(table, is_head=is_head))
    assert rows.dtype == dtype and torch.equal(rows, table[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(ops: NpuOps, references: References, dtype: torch.dtype, offset: float) -> None:
    x, residual = random(5, 96, dtype=dtype, seed=1), random(5, 96, dtype=dtype)
    weight = random(96, seed=2).to(dtype).float() + offset  # 1 + w has more digits than bfloat16
    packed = ops.pack_norm(weight, dtype)
    assert_close(ops.rms_norm(x, packed, 1e-5), NARROW.rms_norm(x, weight, 1e-5))
    mine, theirs = residual.clone(), residual.clone()
    assert_close(ops.add_rms_norm(x, mine, packed, 1e-5), NARROW.add_rms_norm(x, theirs, weight, 1e-5))
    assert torch.equal(mine, theirs)
    fused = "npu_add_rms_norm" in references.calls
    assert fused == (packed.dtype == dtype) and torch.equal(packed.float(), weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_rms_norm(ops: NpuOps, dtype: torch.dtype) -> None:
    heads, mine = Heads(4, 2, 64), random(6, 8 * 64, dtype=dtype)
    theirs, weights = mine.clone(), [random(64, seed=seed).to(dtype).float() for seed in (1, 2)]
    ops.head_rms_norm(mine, *(ops.pack_norm(weight, dtype) for weight in weights), heads, eps=1e-6)
    NARROW.head_rms_norm(theirs, *weights, heads, eps=1e-6)
    assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_rope(ops: NpuOps, dtype: torch.dtype, head_dim: int) -> None:
    heads, mine = Heads(4, 2, head_dim), random(6, 8 * head_dim, dtype=dtype)
    theirs, positions = mine.clone(), torch.tensor([0, 1, 5, 90, 7, 99], dtype=torch.int32)
    table = random(100, head_dim, seed=3)
    for _ in range(2):  # as two layers
        ops.rope(mine, positions, table, heads)
        NARROW.rope(theirs, positions, table, heads)
    assert_close(mine, theirs)


def test_rope_looks_up_again_where_it_must(ops: NpuOps) -> None:
    heads, tables = Heads(1, 1, 16), [random(9, 16, seed=seed) for seed in (1, 2)]
    batch = batch_of([([1, 2], 0, [0])], 128)
    start = random(2, 48)
    for table in (*tables, tables[0]):
        for first in (0, 5):
            batch.positions += first  # in place, as a graph's inputs change
            placed, mine, theirs = ops.place(batch), start.clone(), start.clone()
            ops.rope(mine, placed.positions, table, heads)
            NARROW.rope(theirs, placed.positions, table, heads)
            assert_close(mine, theirs)
            batch.positions -= first


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(ops: NpuOps, dtype: torch.dtype) -> None:
    both = random(7, 2 * 37, dtype=dtype)
    assert_close(ops.silu_mul(both), NARROW.silu_mul(both))
    assert_close(ops.gelu_mul(both), NARROW.gelu_mul(both))


# --- the cache ----------------------------------------------------------------------------------------------------

MIXED = [(1, 1), (1, 129), (1, 300), (5, 5), (40, 72), (17, 300), (3, 128)]  # (new tokens, context)


def scene(dtype: torch.dtype, poison: float = torch.nan) -> tuple[LayerKV, list[torch.Tensor], list[list[int]]]:
    """A cache whose unused slots hold `poison`; every sequence's qkv rows and blocks. Block 0 is nobody's."""
    counts = [-(-context // 128) for _, context in MIXED]
    order = (torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1)) + 1).tolist()
    blocks = [[order.pop() for _ in range(count)] for count in counts]
    sides = torch.full((2, sum(counts) + 3, 128, 2, 32), poison, dtype=dtype).transpose(2, 3)
    kv = LayerKV(sides[0], sides[1])
    tokens = [random(context, 10 * 32, dtype=dtype, seed=10 + i) for i, (_, context) in enumerate(MIXED)]
    for i, rows in enumerate(tokens):
        NARROW.write_kv(rows, kv, queries(blocks, [(i, 0, len(rows))]).slots, HEADS)
    return kv, tokens, blocks


def queries(blocks: list[list[int]], pieces: list[tuple[int, int, int]]) -> Batch:
    """Queries of sequences: (sequence, first position, end)."""
    return batch_of([(range(end - first), first, blocks[i]) for i, first, end in pieces], 128)


LAST = [(i, context - new, context) for i, (new, context) in enumerate(MIXED)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 2, 33, 128, 129, 1000])
def test_attention(ops: NpuOps, dtype: torch.dtype, window: int | None) -> None:
    kv, tokens, blocks = scene(dtype)
    qkv = torch.cat([tokens[i][first:end] for i, first, end in LAST])
    batch = queries(blocks, LAST)
    actual = ops.attention(qkv, kv, ops.place(batch), HEADS, scale=0.2, window=window)
    assert actual.isfinite().all()
    assert_close(actual, NARROW.attention(qkv, kv, batch, HEADS, scale=0.2, window=window))


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_touches_its_slots_only(ops: NpuOps, dtype: torch.dtype) -> None:
    kv, tokens, blocks = scene(dtype)
    expected = [side.clone() for side in (kv.k, kv.v)]
    kv.k.fill_(torch.nan)
    kv.v.fill_(torch.nan)
    for i, rows in enumerate(tokens):
        ops.write_kv(rows, kv, queries(blocks, [(i, 0, len(rows))]).slots, HEADS)
    for side, wanted in zip((kv.k, kv.v), expected, strict=True):
        assert torch.equal(side.nan_to_num(9.0), wanted.nan_to_num(9.0))


def test_every_attention_is_one_call(ops: NpuOps, references: References) -> None:
    kv, tokens, blocks = scene(torch.bfloat16)
    qkv = torch.cat([tokens[i][first:end] for i, first, end in LAST])
    ops.attention(qkv, kv, ops.place(queries(blocks, LAST)), HEADS, scale=0.2, window=None)
    assert references.calls == ["npu_fused_infer_attention_score"]


# --- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "chunk"), [*((name, chunk) for name in NAMES for chunk in (10**6, 16)), ("qwen3", 1), ("gemma3_text", 1)]
)
def test_float32_logits_are_the_oracles(ops: NpuOps, name: str, chunk: int) -> None:
    folder = tiny_checkpoint(name)
    model = build(folder, "float32", ops)
    for ids, expected in answers(folder):
        assert (run(model, ids, chunk=chunk, block_size=128) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_the_references(ops: NpuOps, name: str) -> None:
    folder = tiny_checkpoint(name)
    mine, theirs = build(folder, "bfloat16", ops), build(folder, "bfloat16", NARROW)
    ids, oracle = answers(folder)[2]
    found, expected = (run(model, ids, chunk=32, block_size=128) for model in (mine, theirs))
    noise = (expected - oracle).square().mean().sqrt()
    assert (found - oracle).square().mean().sqrt() <= 1.2 * noise


def test_sequences_side_by_side(ops: NpuOps) -> None:
    folder = tiny_checkpoint("gemma3_text")
    model = build(folder, "float32", ops)
    oracle = answers(folder)
    kv = poisoned_kv(model, 1 + len(oracle), 128, "token_major")
    rows = [(ids, 0, [1 + i]) for i, (ids, _) in enumerate(oracle)]
    together = model.forward(batch_of(rows, 128), kv)
    assert (together - torch.cat([expected for _, expected in oracle])).abs().max() <= 1e-4


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("llama_tied", "bfloat16"), ("llama", "float32")])
def test_the_wide_head_counts_as_weights(ops: NpuOps, name: str, dtype: str) -> None:
    folder = tiny_checkpoint(name)
    model, other = build(folder, dtype, ops), build(folder, dtype)
    widened = 320 * 64 * 2 if dtype == "bfloat16" else 0
    assert model.weight_bytes == other.weight_bytes + widened
    assert model.embedding.weight.dtype == (torch.float32 if name == "llama_tied" or not widened else torch.bfloat16)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_types_the_vendor_has_no_attention_for_are_refused_before_weights_are_read() -> None:
    vendors = References()
    with pytest.raises(ModelError, match=r"attention does not take float32: types .*--dtype=bfloat16"):
        build(tiny_checkpoint("llama"), "float32", NpuOps(operators=vendors))
    assert vendors.calls == ["npu_fused_infer_attention_score"]
    assert build(tiny_checkpoint("llama"), "bfloat16", NpuOps(operators=vendors)).dtype == torch.bfloat16


@pytest.mark.parametrize("heads", [Heads(4, 2, 24), Heads(4, 2, 528), Heads(66, 1, 64), Heads(257, 257, 64)])
def test_heads_the_vendor_cannot_take(ops: NpuOps, heads: Heads) -> None:
    with pytest.raises(ModelError, match=f"{heads.num_heads} heads"):
        ops.check_heads(heads)
