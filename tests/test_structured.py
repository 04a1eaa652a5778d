"""Constrained answers, penalties and scores over HTTP, from a request's JSON to a real model's tokens and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from local_serving import LocalServing, local_serving
from scripted_server import error_of
from stream_grammar import check_stream

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "degrees": {"type": "integer", "minimum": -50, "maximum": 50}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "How warm is it?"}]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServing]:
    with local_serving(tmp_path_factory.mktemp("structured")) as made:
        yield made


def chat(serving: LocalServing, **fields: Any) -> Any:
    return serving.post("/v1/chat/completions", messages=MESSAGES, **{"max_tokens": 100, "seed": 3, **fields})


def test_an_answer_fits_its_schema_whole_and_streamed(serving: LocalServing) -> None:
    whole = chat(serving, response_format=FORMAT, n=2).json()
    stream = check_stream(chat(serving, response_format=FORMAT, n=2, stream=True).text, chat=True)
    for choice in whole["choices"]:
        text = choice["message"]["content"]
        assert set(json.loads(text)) == {"city", "degrees"} and choice["finish_reason"] == "stop"
        assert (stream.choices[choice["index"]].text, stream.choices[choice["index"]].finish) == (text, "stop")


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"type": "regex", "regex": r"\d{2}:\d{2}"}, r"\d{2}:\d{2}"),
        ({"type": "lark", "lark": 'start: ("ab" | "cd")+ "."'}, r"(ab|cd)+\."),
        ({"type": "json_object"}, r"(?s)\{.*"),
    ],
)
def test_the_other_formats(serving: LocalServing, wanted: Any, pattern: str) -> None:
    answer = serving.post("/v1/completions", prompt="x", max_tokens=60, response_format=wanted, temperature=0.5).json()
    text = answer["choices"][0]["text"]
    assert re.fullmatch(pattern, text) or answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}, {"type": "regex", "regex": "("},
        {"type": "lark", "lark": "start: unknown"}, {"type": "nothing"}, {"type": "regex", "regex": "a?" * 20_000},
    ],
)  # fmt: skip
def test_a_bad_format_is_a_400_that_names_it(serving: LocalServing, wanted: Any, stream: bool) -> None:
    answer = chat(serving, response_format=wanted, stream=stream)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "response_format")
    assert chat(serving, max_tokens=2).status_code == 200


def test_an_evaluation_harness_gets_its_scores(serving: LocalServing) -> None:
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7]]
    for _ in range(2):  # the second time everything would be cached
        answer = serving.post(
            "/v1/completions", prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0
        ).json()
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            scores = choice["logprobs"]
            assert len(scores["token_logprobs"]) == len(scores["tokens"]) == len(prompt) + 1
            assert scores["token_logprobs"][0] is None and all(value < 0 for value in scores["token_logprobs"][1:])
            assert all(len(top) <= 2 for top in scores["top_logprobs"][1:])


def test_biases_and_penalties_change_the_answer(serving: LocalServing) -> None:
    fields = {"prompt": "x", "max_tokens": 12, "temperature": 0}
    biased = serving.post("/v1/completions", logit_bias={"65": 100}, **fields).json()["choices"][0]["text"]
    varied = serving.post("/v1/completions", logit_bias={"65": 8}, frequency_penalty=2, **fields).json()["choices"][0]
    assert biased == "b" * 12 and varied["text"] != biased
