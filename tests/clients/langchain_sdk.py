"""langchain-openai against a running server: invoke, stream and batch, with usage and reasons to finish.

python langchain_sdk.py URL MODEL
"""

from __future__ import annotations

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

QUESTION = "What is the capital of France?"


def main(url: str, model: str) -> None:
    common = {"base_url": f"{url}/v1", "api_key": "none", "model": model, "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**common, max_completion_tokens=12, timeout=60, stream_usage=True)
    whole = chat.invoke(QUESTION)
    assert "Paris" in whole.content and whole.response_metadata["finish_reason"] in ("stop", "length")
    assert whole.response_metadata["model_name"] == model

    joined = None
    for chunk in chat.stream(QUESTION):
        joined = chunk if joined is None else joined + chunk
    assert joined.content == whole.content
    assert joined.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]
    names = ("input_tokens", "output_tokens", "total_tokens")
    assert [joined.usage_metadata[name] for name in names] == [whole.usage_metadata[name] for name in names]
    assert whole.usage_metadata["output_tokens"] > 0

    prompt = ChatPromptTemplate.from_messages([("system", "You answer in one word."), ("user", "{question}")])
    answers = (prompt | chat | StrOutputParser()).batch([{"question": QUESTION}, {"question": "What is 1 + 1?"}])
    assert all(answers) and answers[0] != answers[1]
    assert "Paris" in OpenAI(**common, max_tokens=4).invoke("The capital of France is")


if __name__ == "__main__":
    main(*sys.argv[1:])
