"""What is the Llama family's own, and what models need beside their layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint
from model_runs import build, run
from paged import batch_of, poisoned_kv


def test_logits_of_the_wanted_rows_only() -> None:
    model = build(tiny_checkpoint("llama_tied"), "float32")
    ids = list(range(20))
    whole, batch, kv = run(model, ids), batch_of([(ids, 0, [1, 0])], 16), poisoned_kv(model, 2, 16, "interleaved")
    batch.logit_rows = torch.tensor([19, 3])
    assert torch.equal(model.forward(batch, kv), whole[[19, 3]])
    batch.logit_rows = torch.tensor([], dtype=torch.int64)
    assert model.forward(batch, kv).shape == (0, 320)


def test_biases_head_dim_and_linear_rope(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    sizes = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6}
    more = {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 50, "attention_bias": True, "mlp_bias": True}
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, **more, rope_parameters=rope)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(0, 50, (40,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(run(build(tmp_path, "float32"), ids), expected, rtol=1e-4, atol=1e-4)


def test_cache_spec_counts_every_byte() -> None:
    model = build(tiny_checkpoint("llama"), "bfloat16")
    token = 2 * 3 * 2 * 16 * 2  # k and v, layers, kv heads, head_dim, bytes
    whole, split = model.cache_spec(16, "interleaved"), model.cache_spec(16, "per_layer")
    assert len(whole.tensors) == 1 and len(split.tensors) == 6
    assert whole.bytes_per_block == split.bytes_per_block == 16 * token
    assert model.cache_spec(16) == whole
    with pytest.raises(ValueError, match="diagonal"):
        model.cache_spec(16, "diagonal")
