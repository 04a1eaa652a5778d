"""The anthropic package against a running server: messages, streams, counting, errors.

python anthropic_sdk.py URL MODEL
"""

from __future__ import annotations

import sys

import anthropic

QUESTION = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}]


def main(url: str, model: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        wanted = {"model": model, "messages": QUESTION, "max_tokens": 12, "extra_body": {"temperature": 0}}
        check_messages(client, wanted)
        check_errors(client, wanted)


def check_messages(client: anthropic.Anthropic, wanted: dict) -> None:
    answer = client.messages.create(**wanted)
    assert (answer.type, answer.role, answer.content[0].type) == ("message", "assistant", "text")
    assert "Paris" in answer.content[0].text and answer.stop_reason in ("end_turn", "max_tokens")
    counted = client.messages.count_tokens(model=wanted["model"], messages=QUESTION).input_tokens
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == counted
    with client.messages.stream(**wanted) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == answer.content[0].text
    assert final.stop_reason == answer.stop_reason
    assert final.usage.output_tokens == answer.usage.output_tokens
    told = client.messages.create(**wanted, system="You only speak of cats.")
    assert told.usage.input_tokens + told.usage.cache_read_input_tokens != counted
    stopped = client.messages.create(**wanted, stop_sequences=["Par"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Par")
    assert "Par" not in stopped.content[0].text


def check_errors(client: anthropic.Anthropic, wanted: dict) -> None:
    for kind, status, name, call in (
        (anthropic.NotFoundError, 404, "not_found_error", {"model": "claude-9"}),
        (anthropic.BadRequestError, 400, "invalid_request_error", {"extra_body": {"temperature": 9}}),
        (anthropic.BadRequestError, 400, "invalid_request_error", {"messages": []}),
    ):
        for stream in (False, True):
            try:
                client.messages.create(**{**wanted, **call}, stream=stream)
            except kind as error:
                assert error.status_code == status and error.body["error"]["type"] == name, error.body
            else:
                raise AssertionError(f"{call.keys()} was taken")


if __name__ == "__main__":
    main(*sys.argv[1:])
