"""Grammars of whole answers, followed by the engine's own compiler; tags are tokens, or they are text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from scripted_server import write_model
from test_grammar import settled
from test_tools import CALL, CLOCK, QWEN, WEATHER

from xllm_cli.core import Grammar
from xllm_cli.engine.grammar import Grammars
from xllm_cli.errors import RequestError
from xllm_cli.server.constraints import constraint_of, parser_of
from xllm_cli.server.parsing import parse
from xllm_cli.server.protocol import ChatRequest
from xllm_cli.server.tokenizer import Tokenizer

TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
REGEX = {"type": "regex", "regex": "a/b+"}


class Model:
    """A folder with a tokenizer, and a compiler for it."""

    def __init__(self, folder: Path, tags: list[str]) -> None:
        write_model(folder, QWEN)
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.add_tokens(tags)
        backend.save(str(folder / "tokenizer.json"))
        self.tokenizer = Tokenizer.from_folder(folder)
        self.grammars = Grammars(folder, vocab_size=320, end_ids=(257,))

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Whether a model may write this text and end."""
        guide = settled(self.grammars.start(grammar))
        assert guide.error is None, guide.error
        for token in self.tokenizer.encode(text):
            if guide.is_complete or guide.mask is None or not guide.mask[token // 8] >> token % 8 & 1:
                return False
            guide.advance(token)
            assert settled(guide).error is None
        return guide.is_complete or (guide.mask is not None and bool(guide.mask[257 // 8] >> 257 % 8 & 1))


@pytest.fixture(params=[TAGS, []], ids=["tokens", "text"], scope="module")
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    made = Model(tmp_path_factory.mktemp("constraints"), request.param)
    yield made
    made.grammars.close()


def constraint(model: Model, prompt_end: str = "", **fields: Any) -> Grammar | None:
    asked = parse(ChatRequest, {"messages": [{"role": "user", "content": "x"}], **fields})
    asked.rendered(prompt_end)
    return constraint_of(asked, model.tokenizer, (257,))


def test_a_free_answer_has_no_grammar(model: Model) -> None:
    assert constraint(model) is constraint(model, tools=[WEATHER]) is None


ANSWERS = [
    ({"response_format": REGEX}, "", ["a/bb", "<think>\nHm a/b.\n</think>\n\na/b"], ["<think>a/b", "x", "a/"]),
    ({"response_format": REGEX}, "<think>\n", ["Hm.\n</think>\n\na/b", "</think>a/b"], ["a/b", "Hm.</think>x"]),
    ({"tools": [WEATHER, CLOCK], "tool_choice": "required"}, "",
     [CALL, f"{CALL}\n{CALL}", f"<think>So</think>\n{CALL}"],
     ["Oslo", CALL.replace("Oslo", "Bonn"), CALL.replace("weather", "x"), f"{CALL} "]),
    ({"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}, "", [CALL], [f"{CALL}\n{CALL}"]),
    ({"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}}}, "",
     ['<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'], [CALL]),
    ({"tools": [WEATHER], "response_format": REGEX}, "", [CALL, "a/b"], ["Oslo"]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_what_may_be_answered(model: Model, number: int) -> None:
    fields, prompt_end, right, wrong = ANSWERS[number]
    grammar = constraint(model, prompt_end, **fields)
    assert grammar is not None
    assert [text for text in right if not model.accepts(grammar, text)] == []
    assert [text for text in wrong if model.accepts(grammar, text)] == []


def test_errors_name_what_the_client_wrote(model: Model) -> None:
    forced = constraint(model, tools=[WEATHER], tool_choice="required")
    assert forced is not None and forced.param == "tools"
    with pytest.raises(RequestError, match="lark"):
        constraint(model, tools=[WEATHER], response_format={"type": "lark", "lark": 'start: "a"'})
    other = {"type": "function", "function": {"name": "x", "parameters": {"$defs": {"city": {"type": "integer"}}}}}
    with pytest.raises(RequestError, match="differently"):
        constraint(model, tools=[WEATHER, other], tool_choice="required")


def test_a_model_without_tags_needs_no_parser(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_model(tmp_path / "plain"))
    asked = parse(ChatRequest, {"messages": [{"role": "user", "content": "x"}]})
    assert parser_of(asked, tokenizer) is None
