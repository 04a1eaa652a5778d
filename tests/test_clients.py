"""The ecosystem's clients against a real server: packages, an evaluation, a load generator, a fuzzer.

Each is a program in `.venv-clients/`; those of `tests/clients/` check for themselves and fail by their exit status.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint
from client_programs import SCRIPTS, run_client
from real_server import Serving
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.clients, pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(300)]
ELASTIC = ("--enable_vmm_kvcache=true", "--vmm_elastic=true", "--block_size=16")


@pytest.fixture(scope="module")
def serving(clients: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    flags = (*ELASTIC, "--dtype=float32", "--max_cache_size=1GiB")
    made = Serving(tmp_path_factory.mktemp("smollm2"), smollm2, *flags)
    yield made
    assert made.stop() == 0, made.log.read_text()


@pytest.fixture(scope="module")
def tiny(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Quick enough for any number of requests, with limits low enough to be met."""
    flags = (*ELASTIC, "--model_id=tiny", "--max_cache_size=64MiB", "--max_concurrent_requests=8")
    folder = tmp_path_factory.mktemp("tiny")
    made = Serving(folder, tiny_checkpoint("llama"), *flags, "--max_body_bytes=256KiB")
    yield made
    assert made.stop() == 0, made.log.read_text()


@pytest.mark.parametrize("name", ["openai", "anthropic", "litellm", "langchain"])
def test_a_package_is_content(name: str, serving: Serving, clients: Path, tmp_path: Path):
    program = SCRIPTS / f"{name}_sdk.py"
    run_client(tmp_path, clients / "python", program, serving.url, "smollm2-135m-instruct", seconds=200)


def test_lm_eval_counts_what_transformers_counts(serving: Serving, clients: Path, smollm2: Path, tmp_path: Path):
    server = f"model=smollm2-135m-instruct,base_url={serving.url}/v1/completions,num_concurrent=2,max_length=8192"
    run_client(
        tmp_path, clients / "lm-eval", "run", "--model=local-completions", "--tasks=xllm_capitals", "--batch_size=4",
        f"--model_args={server},tokenized_requests=True",
        f"--include_path={SCRIPTS}", "--log_samples", f"--output_path={tmp_path}/out", cwd=SCRIPTS, seconds=200,
    )  # fmt: skip
    (log,) = tmp_path.rglob("samples_*.jsonl")
    samples = sorted(map(json.loads, log.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    told = [[float(answer[0][0]) for answer in sample["resps"]] for sample in samples]
    pairs = [[tuple(part.values()) for part in sample["arguments"].values()] for sample in samples]
    assert [len(choices) for choices in told] == [4] * 12
    torch.testing.assert_close(torch.tensor(told), log_likelihoods(smollm2, pairs), atol=1e-3, rtol=0)
    assert sum(sample["acc"] for sample in samples) >= 10


@torch.inference_mode()
def log_likelihoods(folder: Path, pairs: list[list[tuple[str, str]]]) -> torch.Tensor:
    """log p(continuation | context) of each pair by transformers in float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def one(context: str, continuation: str) -> float:
        start, ids = len(tokenizer.encode(context)), torch.tensor([tokenizer.encode(context + continuation)])
        logprobs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        return float(logprobs.gather(1, ids[0, start:, None]).sum())

    return torch.tensor([[one(*pair) for pair in choices] for choices in pairs])


def test_guidellm_has_no_errors(tiny: Serving, clients: Path, tmp_path: Path):
    run_client(
        tmp_path, clients / "guidellm", "run", f"--backend=kind=openai_http,target={tiny.url}", "--disable-console",
        "--profile=kind=concurrent,streams=2", "--constraint=kind=max_requests,count=20",
        "--constraint=kind=max_duration,seconds=20", "--data=kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        f"--tokenizer=kind=hf_auto,model={tiny_checkpoint('llama')}", "--output=kind=json,path=report.json",
        seconds=200, GUIDELLM__MAX_WORKER_PROCESSES="1",
    )  # fmt: skip
    (report,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert report["metrics"]["request_totals"] == {"successful": 20, "errored": 0, "incomplete": 0, "total": 20}
    assert report["metrics"]["output_token_count"]["successful"]["mean"] == 16


def test_schemathesis_finds_no_5xx_and_no_hang(tiny: Serving, clients: Path, tmp_path: Path):
    checks = "not_a_server_error,content_type_conformance,status_code_conformance"
    # a limit of a few bytes makes every later request wait for memory, as it should, and a pause for its end:
    # test_limits.py and test_served.py have these routes
    run_client(
        tmp_path, clients / "schemathesis", "run", f"{tiny.url}/openapi.json", "--phases=coverage,fuzzing",
        "--max-examples=10", "--seed=2", f"--checks={checks}", "--request-timeout=20", "--continue-on-failure",
        "--no-shrink", "--suppress-health-check=all", "--max-failures=20", "--exclude-path=/vmm/limit",
        "--exclude-path=/pause", seconds=200,
    )  # fmt: skip
    served = tiny.log.read_text()
    for path in ("completions", "chat/completions", "responses", "messages"):
        assert f"POST /v1/{path} 200 " in served and f"POST /v1/{path} 400 " in served, path
    assert "Traceback" not in served
    assert tiny.complete(prompt="Still there", max_tokens=3)["usage"]["completion_tokens"] == 3
