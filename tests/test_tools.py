"""Tools and reasoning over HTTP: what reaches the template, what is demanded of the model, and how answers look."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_checkpoint
from local_serving import LocalServing, ScriptedServing, local_serving
from scripted_server import error_of, script, write_model
from stream_grammar import check_stream

QWEN = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", "Rome"]}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServing]:
    folder = tmp_path_factory.mktemp("tools")
    with local_serving(folder, write_model(folder / "qwen", QWEN), ScriptedServing) as made:
        yield made


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServing]:
    folder, model = tmp_path_factory.mktemp("real"), tmp_path_factory.mktemp("model")
    for path in tiny_checkpoint("llama").iterdir():
        (model / path.name).symlink_to(path)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    (model / "chat_template.jinja").write_text(QWEN)
    with local_serving(folder, model) as made:
        yield made


def ask(serving: LocalServing, content: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return serving.post("/v1/chat/completions", **{"messages": messages, "max_tokens": 400, "seed": 1, **fields})


def rendered(serving: LocalServing, **fields: Any) -> str:
    fields = {"messages": [{"role": "user", "content": "hi"}], **fields}
    answer = serving.post("/v1/chat/completions/render", **fields).json()
    return serving.post("/detokenize", tokens=answer["token_ids"]).json()["prompt"]


SAID = [
    (f"Let me see.\n{CALL}\n{CALL}", "Let me see.", "", 2, "tool_calls"),
    (f"<think>\nHm.\n</think>\n\n{CALL}", None, "Hm.", 1, "tool_calls"),
    ("<think>Hm.</think>Hello\n", "Hello\n", "Hm.", 0, "stop"),
    ("No <tools> today.", "No <tools> today.", "", 0, "stop"),
    ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", "", 0, "stop"),
]


@pytest.mark.parametrize(("say", "content", "reasoning", "num_calls", "finish"), SAID)
def test_a_message_is_taken_apart_whole_and_streamed(
    scripted: LocalServing, say: str, content: Any, reasoning: str, num_calls: int, finish: str
) -> None:
    asked = {"tools": [WEATHER], "logprobs": True}
    for per_step in (1, 7):
        prompt = script(say=say, per_step=per_step, finish="stop")
        choice = ask(scripted, prompt, **asked).json()["choices"][0]
        message, calls = choice["message"], choice["message"].get("tool_calls", [])
        assert (message["content"], message.get("reasoning_content", "")) == (content, reasoning)
        assert [call["function"]["name"] for call in calls] == ["weather"] * num_calls
        assert len({call["id"] for call in calls}) == num_calls and choice["finish_reason"] == finish
        stream = check_stream(ask(scripted, prompt, stream=True, **asked).text, chat=True).choices[0]
        assert (stream.text, stream.reasoning, stream.finish) == (content or "", reasoning, finish)
        assert stream.calls == [call["function"] for call in calls]
        assert stream.logprobs == choice["logprobs"]["content"]


def test_a_call_that_was_cut_off_is_none(scripted: LocalServing) -> None:
    choice = ask(scripted, script(say=CALL), tools=[WEATHER], max_tokens=40).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert "tool_calls" not in choice["message"]


def test_without_tools_tags_are_text(scripted: LocalServing) -> None:
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}):
        assert ask(scripted, script(say=CALL), **fields).json()["choices"][0]["message"]["content"] == CALL


def test_a_prompt_may_open_the_reasoning(scripted: LocalServing) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    message = ask(scripted, script(say="So.</think>Yes"), **thinking).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("So.", "Yes")


def test_only_one_call_when_they_must_not_be_parallel(scripted: LocalServing) -> None:
    said = script(say=CALL * 3, finish="stop")
    message = ask(scripted, said, tools=[WEATHER], parallel_tool_calls=False).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1


def test_the_template_gets_tools_and_calls_as_objects(scripted: LocalServing) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "9"}]
    text = rendered(scripted, messages=history, tools=[WEATHER])
    assert text.startswith("[weather]") and "<tool_call>Rome</tool_call>" in text
    assert "weather" not in rendered(scripted, messages=history, tools=[WEATHER], tool_choice="none")


def test_a_last_message_is_continued(scripted: LocalServing) -> None:
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    assert rendered(scripted, messages=history, continue_final_message=True) == "user: hi\nassistant: Well, "
    assert rendered(scripted, messages=history, add_generation_prompt=False) == "user: hi\nassistant: Well, \n"
    assert rendered(scripted, messages=history).endswith("Well, \nassistant:")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"), ({"tools": [{"type": "web"}]}, "tools"), ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"), ({"tools": [CLOCK], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [CLOCK], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"continue_final_message": True, "add_generation_prompt": True}, None),
        ({"continue_final_message": True, "messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages"),
        ({"best_of": 2}, "best_of"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(scripted: LocalServing, fields: Any, param: str | None) -> None:
    answer = ask(scripted, "hi", **fields)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


def test_tools_of_a_model_without_them_are_refused(tmp_path: Path) -> None:
    with local_serving(tmp_path, write_model(tmp_path / "plain"), ScriptedServing) as plain:
        answer = ask(plain, "hi", tools=[WEATHER])
    assert (answer.status_code, error_of(answer)["param"]) == (400, "tools")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_demanded_call_is_made(real: LocalServing, choice: Any, seed: int) -> None:
    asked = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
    answer = ask(real, "Rain?", **asked).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and answer["finish_reason"] == (
        "tool_calls" if choice == "required" else "stop"
    )
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    stream = check_stream(ask(real, "Rain?", stream=True, **asked).text, chat=True).choices[0]
    assert stream.calls == [call["function"]]


def test_a_format_holds_after_the_reasoning(real: LocalServing) -> None:
    wanted = {"type": "regex", "regex": "[0-9]{2}/x"}
    bias = {
        "logit_bias": {str(token): -100 for token in (30, 62)}
    }  # no brackets, so that no tag ends up in the thoughts
    answer = ask(real, "x", response_format=wanted, max_tokens=60, **bias).json()["choices"][0]["message"]
    assert len(answer["content"]) == 4 and answer["content"].endswith("/x")
