"""--priority_strategy=priority: who goes first, who gives way, and what a request may say."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_checkpoint
from local_app import app_of, call, local_state, make_ready
from scripted_server import error_of

from xllm_cli import LLM
from xllm_cli.core import Request, SamplingParams
from xllm_cli.errors import RequestError
from xllm_cli.server.parsing import parse
from xllm_cli.server.protocol import CompletionRequest

PAGE = 64 << 10
SMALL = {
    "dtype": "float32", "block_size": 16, "enable_vmm_kvcache": True, "vmm_elastic": True, "host_page_mode": "4k",
    "phy_page_granularity_size": PAGE, "max_cache_size": 4 * PAGE, "enable_prefix_cache": False,
}  # fmt: skip


def submit(llm: LLM, name: str, priority: int, *, length: int = 20, tokens: int = 8) -> None:
    wanted = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    request = Request(request_id=name, prompt_ids=[1] * length, sampling=wanted, priority=priority)
    assert llm.engine.submit(request) is None


def ends(llm: LLM) -> list[str]:
    """The requests in the order in which they ended."""
    return [one.request_id for one in llm.engine.drain(time.monotonic() + 60) if one.finish is not None]


@pytest.mark.parametrize(
    ("strategy", "order"),
    [("fcfs", ["low", "middle", "late", "high"]), ("priority", ["high", "middle", "late", "low"])],
)
def test_who_goes_first(strategy: str, order: list[str]) -> None:
    with LLM(tiny_checkpoint("llama"), **SMALL, max_seqs_per_batch=1, priority_strategy=strategy) as llm:
        for name, priority in (("low", 1), ("middle", 0), ("late", 0), ("high", -5)):
            submit(llm, name, priority)
        assert ends(llm) == order


@pytest.mark.parametrize(("strategy", "first"), [("fcfs", "low"), ("priority", "high")])
def test_who_gives_way(strategy: str, first: str) -> None:
    with LLM(tiny_checkpoint("llama"), **SMALL, priority_strategy=strategy) as llm:
        submit(llm, "low", 1, length=100, tokens=150)
        llm.engine.step()
        submit(llm, "high", 0, length=100, tokens=150)  # both need 250 tokens of the 336 there are
        assert ends(llm)[0] == first
        assert llm.snapshot.counters.preemptions > 0


def rank(**fields: Any) -> int:
    return parse(CompletionRequest, {"prompt": "x", **fields}).rank


def test_what_a_request_may_say() -> None:
    assert [rank(priority=p) for p in ("HIGH", "NORMAL", "DEFAULT", "LOW", -7, 0, None)] == [-1, 0, 0, 1, -7, 0, 0]
    assert rank() == 0
    for wrong in ("URGENT", 0.5, True, 2**31):
        with pytest.raises(RequestError, match="priority"):
            rank(priority=wrong)


def test_it_is_no_unknown_field(tmp_path: Path) -> None:
    with local_state(tmp_path, strict_requests=True) as state:
        make_ready(state, tmp_path)
        answer = call(app_of(state), "/v1/completions/render", "POST", json={"prompt": "x", "priority": "HIGH"})
        assert answer.status_code == 200, error_of(answer)
