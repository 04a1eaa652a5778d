"""From a request's fields to what the engine is asked."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_server import write_model

from xllm_cli.core import Counters, Ready, SamplingParams, Snapshot, VmmReport
from xllm_cli.errors import RequestError
from xllm_cli.server.parsing import parse
from xllm_cli.server.protocol import ChatRequest, CompletionRequest
from xllm_cli.server.sequences import make_requests
from xllm_cli.server.tokenizer import Tokenizer

READY = Ready(
    model_id="tiny",
    architecture="Tiny",
    dtype="float32",
    max_model_len=64,
    vocab_size=320,
    eos_token_ids=(257,),
    capacity_tokens=256,
    snapshot=Snapshot(memory=VmmReport(), counters=Counters()),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_model(tmp_path_factory.mktemp("sequences") / "tiny"))


def sampling(tokenizer: Tokenizer, *, chat: bool = False, **fields: Any) -> SamplingParams:
    kind = ChatRequest if chat else CompletionRequest
    asked = parse(kind, {"prompt": "x", "messages": [{"role": "user", "content": "x"}], **fields})
    return make_requests(asked, [[1, 2, 3]], "id", READY, tokenizer)[0].sampling


def test_penalties_and_biases_reach_the_engine(tokenizer: Tokenizer) -> None:
    made = sampling(
        tokenizer, presence_penalty=1, frequency_penalty=-0.5, repetition_penalty=1.2, min_p=0.1, logit_bias={"9": 3}
    )
    assert (made.presence_penalty, made.frequency_penalty, made.repetition_penalty) == (1.0, -0.5, 1.2)
    assert (made.min_p, made.logit_bias) == (0.1, ((9, 3.0),))


def test_without_them_the_engine_has_nothing_to_change(tokenizer: Tokenizer) -> None:
    made = sampling(tokenizer)
    assert (made.presence_penalty, made.repetition_penalty, made.min_p, made.logit_bias) == (0, 1, 0, ())


def test_biases_beyond_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    sampling(tokenizer, logit_bias={"319": 1})
    with pytest.raises(RequestError, match="below 320") as caught:
        sampling(tokenizer, logit_bias={"1": 1, "320": 1})
    assert caught.value.param == "logit_bias"
