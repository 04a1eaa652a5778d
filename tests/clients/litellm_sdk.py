"""LiteLLM against a running server, by the providers its users would choose: hosted_vllm/, openai/ and anthropic/.

python litellm_sdk.py URL MODEL
"""

from __future__ import annotations

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its price list is otherwise asked of a host

import litellm

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def main(url: str, model: str) -> None:
    litellm.telemetry = False
    common = {"api_key": "none", "timeout": 60, "max_retries": 0, "num_retries": 0}
    for provider, base in (("hosted_vllm", f"{url}/v1"), ("openai", f"{url}/v1"), ("anthropic", url)):
        print(provider)
        wanted = {**common, "model": f"{provider}/{model}", "api_base": base}
        check_chat({**wanted, "messages": QUESTION, "temperature": 0, "max_tokens": 12})
        check_errors({**wanted, "messages": QUESTION})
    text = litellm.text_completion(
        **common, model=f"hosted_vllm/{model}", api_base=f"{url}/v1", prompt="The capital of France is", max_tokens=4,
        temperature=0,
    )  # fmt: skip
    assert "Paris" in text.choices[0].text and text.usage.completion_tokens == 4


def check_chat(wanted: dict) -> None:
    answer = litellm.completion(**wanted)
    whole = answer.choices[0].message.content
    assert "Paris" in whole and answer.choices[0].finish_reason in ("stop", "length")
    chunks = list(litellm.completion(**wanted, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert len(usages) == 1, usages
    built = litellm.stream_chunk_builder(chunks, messages=wanted["messages"])
    assert built.choices[0].message.content == whole
    assert built.choices[0].finish_reason == answer.choices[0].finish_reason
    assert built.usage.completion_tokens == answer.usage.completion_tokens > 0
    assert built.usage.prompt_tokens == answer.usage.prompt_tokens > 0


def check_errors(wanted: dict) -> None:
    provider = wanted["model"].split("/")[0]
    for kind, call in (
        (litellm.NotFoundError, {"model": f"{provider}/gpt-9"}),
        (litellm.BadRequestError, {"messages": [{"role": "user", "content": "many " * 9000}], "max_tokens": 4}),
    ):
        try:
            litellm.completion(**{**wanted, **call})
        except kind as error:
            assert error.status_code == kind("", "", "").status_code
        else:
            raise AssertionError(f"{call.keys()} was taken")


if __name__ == "__main__":
    main(*sys.argv[1:])
