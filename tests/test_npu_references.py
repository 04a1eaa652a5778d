"""The references of the npu's operators refuse what the vendor's refuse, and read what those read."""

from __future__ import annotations

import pytest
import torch
from npu.operators import OperatorError, References


def paged_arguments() -> dict[str, object]:
    """A call the vendor takes: two sequences of 1 and 3 new tokens with 130 and 3 tokens of KV."""
    cache = torch.zeros(5, 128, 64, dtype=torch.bfloat16)
    return {
        "query": torch.zeros(4, 4, 32, dtype=torch.bfloat16),
        "key": cache,
        "value": cache.clone(),
        "atten_mask": torch.ones(2048, 2048, dtype=torch.int8).triu(1),
        "actual_seq_lengths": [1, 4],
        "actual_seq_lengths_kv": [130, 3],
        "block_table": torch.tensor([[3, 1], [2, 0]], dtype=torch.int32),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.5,
        "input_layout": "TND",
        "sparse_mode": 3,
        "block_size": 128,
    }


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "float32": ({"query": torch.zeros(4, 4, 32)}, "types"),
    "a strided cache": ({"key": torch.zeros(5, 128, 128, dtype=torch.bfloat16)[:, :, ::2]}, "key is not contiguous"),
    "a strided query": ({"query": torch.zeros(4, 8, 32, dtype=torch.bfloat16)[:, ::2]}, "query is not contiguous"),
    "a small block": ({"block_size": 64}, "block 128"),
    "a 64-bit table": ({"block_table": torch.tensor([[3, 1], [2, 0]])}, "block_table int32"),
    "a short table": ({"block_table": torch.tensor([[3], [2]], dtype=torch.int32)}, "130 keys need 2 blocks"),
    "a block outside": ({"block_table": torch.tensor([[3, 5], [2, 0]], dtype=torch.int32)}, r"blocks \[3, 5\]"),
    "lengths of each, not ends": ({"actual_seq_lengths": [1, 3]}, "lengths end at 3"),
    "fewer keys than queries": ({"actual_seq_lengths_kv": [130, 2]}, "row 1: queries 1 to 4, 2 keys"),
    "a missing length": ({"actual_seq_lengths_kv": [130]}, "2 and 1 lengths"),
    "no mask": ({"atten_mask": None}, "without its mask"),
    "a mask of the context": ({"atten_mask": torch.ones(130, 130, dtype=torch.int8).triu(1)}, r"\[2048, 2048\]"),
    "a mask upside down": ({"atten_mask": torch.ones(2048, 2048, dtype=torch.int8).tril()}, "does not hide"),
    "an unknown layout": ({"input_layout": "BSND"}, "only TND"),
    "an unknown mode": ({"sparse_mode": 5}, "sparse_mode 5"),
    "a negative band": ({"sparse_mode": 4, "pre_tokens": -1, "next_tokens": 0}, "band -1"),
    "heads that do not fit": ({"num_key_value_heads": 1}, "64 a token"),
    "sinks": ({"learnable_sink": torch.zeros(4)}, "learnable_sink"),
    "a soft cap": ({"softcap": 30.0}, "softcap"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_attention_refuses(wrong: str) -> None:
    references, good, (changed, text) = References(), paged_arguments(), WRONG[wrong]
    out, _ = references.npu_fused_infer_attention_score(**good)
    assert out.shape == (4, 4, 32)
    with pytest.raises(RuntimeError, match=text):
        references.npu_fused_infer_attention_score(**{**good, **changed})


BAD_SLOTS = {"repeated": [3, 3], "negative": [-1, 3], "outside": [0, 5 * 128]}


@pytest.mark.parametrize("wrong", BAD_SLOTS)
def test_writes_refuse_slots(wrong: str) -> None:
    references, cache = References(), torch.zeros(5, 128, 2, 32)
    key = torch.ones(2, 2, 32)
    references.npu_scatter_pa_kv_cache(key, key, cache, cache.clone(), torch.tensor([7, 639]), cache_mode="Norm")
    assert int(cache.sum()) == 2 * 64 and bool(cache[0, 7].all()) and bool(cache[4, 127].all())
    with pytest.raises(OperatorError, match="slots"):
        slots = torch.tensor(BAD_SLOTS[wrong])
        references.npu_scatter_pa_kv_cache(key, key, cache, cache.clone(), slots, cache_mode="Norm")


def test_other_operators_refuse() -> None:
    references, x = References(), torch.ones(2, 8)
    with pytest.raises(OperatorError, match="types"):
        references.npu_rms_norm(x.bfloat16(), torch.ones(8), 1e-5)
    with pytest.raises(OperatorError, match="contiguous"):
        references.npu_rms_norm(torch.ones(8, 2).T, torch.ones(8), 1e-5)
    with pytest.raises(OperatorError, match="types"):
        references.npu_add_rms_norm(x, x, torch.ones(8).bfloat16(), 1e-5)
    with pytest.raises(OperatorError, match="odd"):
        references.npu_swiglu(torch.ones(2, 7), -1)
    with pytest.raises(OperatorError, match="BSND"):
        references.npu_rotary_mul(torch.ones(1, 2, 3, 8), torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 8))


def test_what_is_not_read_does_not_matter_and_what_is_masked_does() -> None:
    """A masked position inside a sequence is read with its tile: 0 · NaN would show, so no one may rely on it."""
    arguments, references = paged_arguments(), References()
    key = torch.full_like(arguments["key"], torch.nan)
    key[3], key[1, :2], key[2, :3] = 1.0, 1.0, 1.0
    good, _ = references.npu_fused_infer_attention_score(**{**arguments, "key": key, "value": key})
    assert good.isfinite().all()
    key[2, 2] = torch.nan  # the last of three: masked for the first two queries
    poisoned, _ = references.npu_fused_infer_attention_score(**{**arguments, "key": key, "value": key})
    assert poisoned[0].isfinite().all() and poisoned[1:].isnan().all()
