"""The operators and captured steps on tensors of the emulated device, called through torch_npu itself.

torch_npu binds every call to the vendor's schema and owns the memory; what the kernels would compute, references do.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from checkpoints import tiny_checkpoint
from model_runs import answers, build
from paged import batch_of

from npu.dispatch import ComputeOnHost, alias, install
from npu.operators import SCHEMAS, OperatorError, References
from xllm_cli.errors import ModelError
from xllm_cli.flags import Config
from xllm_cli.models.batch import LayerKV
from xllm_cli.models.decoder import Decoder
from xllm_cli.models.ops.base import Heads
from xllm_cli.models.ops.npu import NpuOps
from xllm_cli.worker.graphs import DecodeGraphs, GraphOptions
from xllm_cli.worker.npu_device import NpuDevice, open_npu

pytestmark = pytest.mark.npu
NPU = "npu:0"
BLOCK = 128


@pytest.fixture(scope="module")
def mode() -> Iterator[ComputeOnHost]:
    NpuDevice(Config()).open_driver().close()
    open_npu(0)
    entered = install()
    yield entered
    entered.__exit__(None, None, None)


@pytest.fixture(params=["llama", "qwen3", "gemma3_text"])
def model(mode: ComputeOnHost, request: pytest.FixtureRequest) -> Decoder:
    return build(tiny_checkpoint(request.param), "float32", NpuOps(0))


def poisoned(model: Decoder, num_blocks: int) -> list[LayerKV]:
    """A cache of NaN on the device."""
    config = model.config
    shape = (num_blocks, BLOCK, config.num_kv_heads, config.head_dim)
    made = [[torch.full(shape, torch.nan, device=NPU).transpose(1, 2) for _ in "kv"] for _ in range(config.num_layers)]
    return [LayerKV(*sides) for sides in made]


def oracle(model: Decoder) -> list[tuple[list[int], torch.Tensor]]:
    named = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "Gemma3ForCausalLM": "gemma3_text"}
    return answers(tiny_checkpoint(named[model.config.architecture]))


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_references_have_the_vendors_schemas(mode: ComputeOnHost, name: str) -> None:
    real = getattr(torch.ops.npu, name).default._schema
    assert real == torch._C.parse_schema(f"npu::{name}{SCHEMAS[name]}")


@torch.inference_mode()
def test_logits_are_the_oracles(mode: ComputeOnHost, model: Decoder) -> None:
    mode.references.calls.clear()
    for ids, expected in oracle(model):
        kv = poisoned(model, 3)
        steps = [batch_of([(ids[i : i + 33], i, [2])], BLOCK) for i in range(0, len(ids), 33)]
        found = [model.forward(step, kv) for step in steps]
        assert {logits.device for logits in found} == {torch.device(NPU)}
        assert (torch.cat([logits.cpu() for logits in found]) - expected).abs().max() <= 1e-4
    assert set(mode.references.calls) == set(SCHEMAS) - ({"npu_swiglu"} if is_gemma(model) else set())


def is_gemma(model: Decoder) -> bool:
    """Its gate is no SwiGLU."""
    return model.config.architecture == "Gemma3ForCausalLM"


@torch.inference_mode()
def test_captured_steps_give_the_same_logits(mode: ComputeOnHost, model: Decoder) -> None:
    kv = poisoned(model, 5)
    options = GraphOptions(runtime=torch.npu, sizes=(1, 2, 4), max_context=256)
    graphs = DecodeGraphs(model, kv, options)
    graphs.capture()
    for step in range(8):
        rows = [([ids[step]], step, [1 + i]) for i, (ids, _) in enumerate(oracle(model))]
        logits = graphs.forward(batch_of(rows, BLOCK))
        assert logits is not None and logits.device == torch.device(NPU)
        expected = torch.stack([wanted[step] for _, wanted in oracle(model)])
        assert (logits.cpu() - expected).abs().max() <= 1e-4
    graphs.close()


@torch.inference_mode()
def test_the_vendors_graphs_take_what_is_captured(mode: ComputeOnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.npu's own graphs: the runtime breaks a capture at the first call that waits for the device.

    Their replay runs nothing here; but rebinding makes each layer's attention again, with the lengths it is given.
    """
    model = build(tiny_checkpoint("llama"), "float32", NpuOps(0))
    kv, seen, run = poisoned(model, 5), [], References.run

    def noted(self: References, name: str, *args: object, **kwargs: object) -> object:
        if name == "npu_fused_infer_attention_score":
            seen.append((kwargs["actual_seq_lengths_kv"], "out" in kwargs))
        return run(self, name, *args, **kwargs)

    monkeypatch.setattr(References, "run", noted)
    graphs = DecodeGraphs(model, kv, GraphOptions(runtime=mode.vendor_graphs, sizes=(4,), max_context=256))
    graphs.capture()
    layers = model.config.num_layers
    assert seen == [([1, 1, 1, 1], False)] * layers + [([128] * 4, True)] * layers
    seen.clear()
    logits = graphs.forward(batch_of([([7], 0, [1]), ([8], 130, [2, 3])], BLOCK))
    assert logits is not None and logits.shape == (2, model.config.vocab_size)
    assert seen == [([1, 131, 1, 1], True)] * layers
    graphs.close()


def test_a_call_the_vendor_would_refuse_is_refused_on_the_device(mode: ComputeOnHost) -> None:
    x = torch.ones(2, 8, device=NPU)
    with pytest.raises(OperatorError, match="types"):
        torch.ops.npu.npu_rms_norm(x, torch.ones(8, dtype=torch.bfloat16, device=NPU), 1e-5)
    with pytest.raises(RuntimeError, match="softcap"):
        torch.ops.npu.npu_fused_infer_attention_score(x, x, x, softcap=30.0)
    with pytest.raises(ModelError, match="24"):
        NpuOps(0).check_heads(Heads(2, 2, 24))


def test_float32_is_refused_where_attention_refuses_it(mode: ComputeOnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "references", References())
    with pytest.raises(ModelError, match=r"attention does not take float32.*--dtype=bfloat16"):
        NpuOps(0).activation_dtype(torch.float32)
    assert NpuOps(0).activation_dtype(torch.bfloat16) == torch.bfloat16


@torch.inference_mode()
def test_computing_on_the_host_leaves_memory_where_it_is(mode: ComputeOnHost) -> None:
    x = torch.arange(12.0, device=NPU).view(3, 4)
    address = x.data_ptr()
    view = x[:, 1::2]
    view.add_(10)
    assert alias(x).data_ptr() == address and view.cpu().tolist() == [[11, 13], [15, 17], [19, 21]]
    assert x.T.contiguous().cpu().tolist() == x.cpu().T.tolist()
    x[1:, :2] = torch.tensor([[1.0, 2.0]])  # from the host, into a piece
    assert x.cpu()[1:, :2].tolist() == [[1, 2], [1, 2]]
    assert x.bfloat16().device == torch.device(NPU) and x[:, 2].cpu().is_contiguous()
    assert int(x.argmax()) == 11 and x.data_ptr() == address
