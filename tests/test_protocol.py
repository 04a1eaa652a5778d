"""Requests as JSON: shapes, ranges, and refusals that never repeat what was sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xllm_cli.errors import RequestError
from xllm_cli.server.parsing import UNSUPPORTED, body_schema, parse
from xllm_cli.server.protocol import ChatRequest, CompletionRequest

USER = [{"role": "user", "content": "hi"}]
SECRET = "do-not-repeat-me"


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "hi", **fields}).encode())


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": USER, **fields}).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"null", b"1", b'"x"', b'{"prompt":', b'{"prompt": NaN}', b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}', b'{"prompt": 1e999}', b"[" * 100_000, b'{"a":' * 100_000, b"{'prompt': 'x'}",
        b'{"prompt": "x",}',
    ],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse(CompletionRequest, body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@given(st.binary(max_size=64) | st.recursive(st.none() | st.text() | st.floats() | st.integers(), st.lists).map(
    lambda value: json.dumps({"prompt": value, "messages": value, "stop": value, "max_tokens": value}).encode()
))  # fmt: skip
def test_any_body_is_parsed_or_refused(body: bytes) -> None:
    for kind in (CompletionRequest, ChatRequest):
        try:
            request = parse(kind, body)
            if isinstance(request, CompletionRequest):
                request.prompts()
        except RequestError as error:
            assert error.status == 400


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, 0.0, 1, 2], [-0.1, 2.1, "1", True]),
        ("top_p", [0.01, 1], [0, 1.1, -1]),
        ("top_k", [-1, 0, 1, 50], [-2, 1.5, "1"]),
        ("min_p", [0, 0.5, 1], [-0.1, 1.1, "0"]),
        ("presence_penalty", [-2, 0, 2], [-2.1, 2.1, True]),
        ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.01, 1, 2, 100], [0, 1e-40, 0.009, -1, 101]),
        ("logit_bias", [{}, {"0": -100, "7": 1.5}], [{"x": 1}, {"-1": 1}, {"1": 101}, {"1": None}, [], {"²": 1}]),
        ("max_tokens", [1, 2**31 - 1], [0, -1, 1.5, "1", True, 2**31]),
        ("min_tokens", [0, 1], [-1]),
        ("n", [1, 128], [0, 129]),
        ("seed", [0, -(2**63), 2**63 - 1], [2**63, 1.5]),
        ("stop", ["a", ["a", "b"], []], ["", [""], ["a"] * 17, ["a" * 1025], 1, [1]]),
        ("stop_token_ids", [[], [1]], [[-1], ["a"], 1]),
        ("logprobs", [0, 20], [21, -1, True]),
        ("stream", [True, False], ["true", 1]),
        ("model", ["x", ""], [1]),
    ],
)
def test_ranges(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in [*good, None]:
        completion(**{field: value})
    for value in bad:
        with pytest.raises(RequestError) as caught:
            completion(**{field: value})
        assert (caught.value.status, caught.value.param) == (400, field)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2]], [[1], [2]]), (["a", [2]], ["a", [2]])],
)
def test_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], 1, {}, [1.5], [True], [-1], [2**31], [1, "a"], [[1], 2], ["a"] * 129]
)
def test_bad_prompts(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        completion(prompt=prompt).prompts()
    assert caught.value.param == "prompt"


def test_a_missing_prompt_names_it() -> None:
    with pytest.raises(RequestError, match="prompt") as caught:
        parse(CompletionRequest, b"{}")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"), ("hi", "messages"), ([{"content": "x"}], "messages.0.role"), ([1], "messages.0"),
        ([{"role": "user", "content": 1}], "messages.0.content"), ([*USER, {"role": ""}], "messages.1.role"),
    ],
)  # fmt: skip
def test_bad_messages(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(messages=messages)
    assert caught.value.param == param


def test_content_parts_join_and_must_be_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = chat(messages=[{"role": "user", "content": parts, "name": "n"}]).messages
    assert message.for_template() == {"role": "user", "content": "a\nb", "name": "n"}
    for part in ({"type": "image_url", "image_url": {}}, {"type": "text"}, {"type": "text", "text": 1}, {}):
        with pytest.raises(RequestError, match="text"):
            chat(messages=[{"role": "user", "content": [part]}]).messages[0].for_template()


def test_empty_content_is_an_empty_text() -> None:
    assert chat(messages=[{"role": "user", "content": None}]).messages[0].for_template()["content"] == ""


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5).token_limit == 5
    assert chat(max_tokens=5, max_completion_tokens=7).token_limit == 7
    assert chat().token_limit is None


def test_log_probabilities_are_counted() -> None:
    assert (chat().num_logprobs, chat(logprobs=True).num_logprobs) == (None, 0)
    assert chat(logprobs=True, top_logprobs=3).num_logprobs == 3
    assert completion(logprobs=2).num_logprobs == 2
    with pytest.raises(RequestError, match="top_logprobs needs logprobs"):
        chat(top_logprobs=3)


def test_biases_are_by_token_id() -> None:
    assert completion(logit_bias={"10": 1, "9": -2.5}).biases == ((9, -2.5), (10, 1.0))
    assert completion().biases == ()
    with pytest.raises(RequestError, match="at most"):
        completion(logit_bias={str(token): 1 for token in range(1025)})


def test_only_an_echo_may_generate_nothing() -> None:
    assert completion(max_tokens=0, echo=True).num_prompt_logprobs == 0
    assert completion(echo=True, logprobs=2).num_prompt_logprobs == 2
    assert completion(echo=True).num_prompt_logprobs is completion(logprobs=2).num_prompt_logprobs is None
    for fields in ({"max_tokens": 0}, {"max_tokens": 0, "echo": False}):
        with pytest.raises(RequestError) as caught:
            completion(**fields)
        assert caught.value.param == "max_tokens"


def test_stream_options_need_a_stream() -> None:
    assert completion(stream=True, stream_options={"include_usage": True}).wants_usage
    assert not completion(stream=True, stream_options={}).wants_usage
    with pytest.raises(RequestError, match="stream_options needs stream"):
        completion(stream_options={"include_usage": True})


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_known_but_unsupported_fields_are_refused_unless_neutral(name: str) -> None:
    for neutral in UNSUPPORTED[name]:
        assert completion(**{name: neutral}).ignored_fields == []
    with pytest.raises(RequestError, match=f"{name} is not supported") as caught:
        completion(**{name: {"some": "thing"}})
    assert (caught.value.status, caught.value.param) == (400, name)


def test_unknown_fields_are_accepted_and_named() -> None:
    request = completion(temperatur=1, user="me", **{SECRET + " \n": 1})
    assert request.ignored_fields == ["?", "temperatur"]


@pytest.mark.parametrize("field", ["prompt", "temperature", "stop", "stream_options", "model", "max_tokens"])
@pytest.mark.parametrize("value", [[[SECRET]], {SECRET: SECRET}])
def test_errors_never_repeat_the_input(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**{field: value}).prompts()
    assert SECRET not in caught.value.message


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_the_schema_stands_alone(kind: type[CompletionRequest | ChatRequest]) -> None:
    schema = json.dumps(body_schema(kind))
    assert "$ref" not in schema and "$defs" not in schema
