"""The openai package against a running server: what its types, its streams and its exceptions make of our answers.

python openai_sdk.py URL MODEL
"""

from __future__ import annotations

import math
import sys

import openai

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def main(url: str, model: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1/", api_key="none", max_retries=0, timeout=60) as client:
        assert [card.id for card in client.models.list()] == [model]
        assert client.models.retrieve(model).id == model
        wanted = {"model": model, "temperature": 0}
        check_chat(client, wanted)
        check_completions(client, wanted)
        check_responses(client, wanted)
        check_errors(client, wanted)


def check_chat(client: openai.OpenAI, wanted: dict) -> None:
    wanted = {**wanted, "messages": QUESTION, "max_completion_tokens": 12, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(**wanted)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens and all(len(token.top_logprobs) == 3 for token in tokens)
    assert b"".join(bytes(token.bytes) for token in tokens).decode().startswith(answer.choices[0].message.content)
    assert all(token.token == token.top_logprobs[0].token for token in tokens), "greedy tokens are the likeliest"
    with client.chat.completions.stream(**wanted, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.choices[0].message.content == answer.choices[0].message.content
    assert final.usage.completion_tokens == answer.usage.completion_tokens
    assert [token.token for token in final.choices[0].logprobs.content] == [token.token for token in tokens]


def check_completions(client: openai.OpenAI, wanted: dict) -> None:
    wanted = {**wanted, "prompt": ["The capital of France is", "One, two,"], "max_tokens": 6, "n": 2, "stop": ["\n\n"]}
    answer = client.completions.create(**wanted, logprobs=2, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(choice.text.startswith(wanted["prompt"][choice.index // 2]) for choice in answer.choices)
    for choice in answer.choices:
        numbers = choice.logprobs.token_logprobs
        assert numbers[0] is None and all(number <= 0 and math.isfinite(number) for number in numbers[1:])
        assert len(numbers) == len(choice.logprobs.tokens) == len(choice.logprobs.text_offset)
    texts = [""] * 4
    for chunk in client.completions.create(**wanted, echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]


def check_responses(client: openai.OpenAI, wanted: dict) -> None:
    wanted = {**wanted, "input": QUESTION[0]["content"], "max_output_tokens": 16, "store": False}
    answer = client.responses.create(**wanted)
    events = list(client.responses.create(**wanted, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "Paris" in answer.output_text and "".join(deltas) == answer.output_text
    assert events[-1].response.usage.output_tokens == answer.usage.output_tokens > 0


def check_errors(client: openai.OpenAI, wanted: dict) -> None:
    many = [{"role": "user", "content": "many " * 9000}]
    for kind, status, code, param, call in (
        (openai.NotFoundError, 404, "model_not_found", "model", {"model": "gpt-9"}),
        (openai.BadRequestError, 400, "invalid_value", "temperature", {"temperature": 9}),
        (openai.BadRequestError, 400, "invalid_value", "messages", {"messages": []}),
        (openai.BadRequestError, 400, "unsupported_parameter", "modalities", {"modalities": ["audio"]}),
        (openai.BadRequestError, 400, "context_length_exceeded", None, {"messages": many}),
    ):
        for stream in (False, True):
            try:
                client.chat.completions.create(**{**wanted, "messages": QUESTION, **call}, stream=stream)
            except kind as error:
                assert (error.status_code, error.code) == (status, code), (error.status_code, error.code)
                assert error.type == "invalid_request_error" and error.message
                assert param is None or error.param == param, error.param
            else:
                raise AssertionError(f"{call.keys()} was taken")


if __name__ == "__main__":
    main(*sys.argv[1:])
