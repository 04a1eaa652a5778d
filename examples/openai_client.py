"""Talk to a running server with the openai package, whole and streamed.

.venv/bin/python examples/openai_client.py http://127.0.0.1:8010
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str) -> None:
    """Print one answer at once and one as it comes."""
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.chat.completions.create(model=model, messages=question, max_tokens=32, temperature=0)
        print(answer.choices[0].message.content)
        print(f"{answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out")
        stream = client.completions.create(model=model, prompt="Once upon a time", max_tokens=32, stream=True)
        for chunk in stream:
            print(chunk.choices[0].text, end="", flush=True)
        print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8010")
