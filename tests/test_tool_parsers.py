"""Parsers of tool calls and reasoning, by the conformance suite `canitoolcall` and by properties of their own."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import canitoolcall
import pytest
from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Family, Fixture, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status
from hypothesis import given
from hypothesis import strategies as st

from xllm_cli.server.deltas import Delta, MessageParser, PlainParser, ToolCall
from xllm_cli.server.reasoning import ThinkParser
from xllm_cli.server.toolcalls import HermesParser, arguments_as_object, parse_call

FIXTURES = load_fixtures(families=["qwen3-hermes"])
DATA = Path(canitoolcall.__file__).parent / "_data" / "fixtures" / "qwen3-hermes"
FAMILY = Family.from_dict(json.loads((DATA / "family.json").read_text(encoding="utf-8")))
LETTERS = st.text(alphabet='a é\n<>/{}"\\', max_size=8)
PARTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name":"f","arguments":{"x":"</tool_call>"}}', '{"name":']
)
TEXT = st.lists(LETTERS | PARTS, max_size=9).map("".join)


def parser(is_open: bool = False) -> MessageParser:
    return ThinkParser(HermesParser(), is_open=is_open)


def parse(made: MessageParser, pieces: Sequence[str]) -> tuple[str, str, list[ToolCall]]:
    """Content, reasoning and calls of a message that comes in these pieces."""
    deltas = [delta for piece in pieces for delta in made.feed(piece)] + made.flush()
    content, reasoning = "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas)
    return content, reasoning, [delta.call for delta in deltas if delta.call is not None]


def observed(fixture: Fixture, pieces: Sequence[str]) -> ParseResult:
    is_open = (fixture.generation_prompt or "").rstrip().endswith("<think>")
    content, reasoning, calls = parse(parser(is_open), pieces)
    return ParseResult(content or None, reasoning or None, tuple(ParsedToolCall(*call) for call in calls))


def cuts(text: str, seed: int, most: int) -> list[str]:
    rng, pieces = random.Random(seed), []
    while text:
        size = rng.randint(1, most)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("fixture", FIXTURES, ids=[fixture.id for fixture in FIXTURES])
def test_the_conformance_suite_passes(fixture: Fixture) -> None:
    text = fixture.raw_output
    streams = {"one": observed(fixture, [text]), "token": observed(fixture, list(text))}
    streams |= {f"rand:{seed}:9": observed(fixture, cuts(text, seed, 9)) for seed in range(6)}
    rows = run_checks(fixture, FAMILY, Observation(nonstream=observed(fixture, [text]), streams=streams))
    assert rows and case_status(rows) is Status.PASS, [row for row in rows if row.status is not Status.PASS]


@given(TEXT, st.booleans(), st.integers(0, 99), st.integers(1, 9))
def test_the_pieces_do_not_matter(text: str, is_open: bool, seed: int, most: int) -> None:
    assert parse(parser(is_open), cuts(text, seed, most)) == parse(parser(is_open), [text])


@given(st.text(alphabet='a é\n>/{}"\\', max_size=30), st.integers(0, 99))
def test_text_without_tags_stays_as_it_is(text: str, seed: int) -> None:
    assert parse(parser(), cuts(text, seed, 5)) == (text, "", [])
    assert parse(PlainParser(), cuts(text, seed, 5)) == (text, "", [])


@given(
    st.dictionaries(st.text(max_size=5), st.text() | st.integers() | st.lists(st.booleans()), max_size=4),
    st.integers(1, 9),
)
def test_any_arguments_come_through(arguments: dict[str, object], most: int) -> None:
    text = "Well.\n<tool_call>\n" + json.dumps({"name": "f", "arguments": arguments}) + "\n</tool_call>\n"
    content, _, calls = parse(parser(), cuts(text, most, most))
    assert content == "Well." and [(call.name, json.loads(call.arguments)) for call in calls] == [("f", arguments)]


def test_only_what_may_become_a_tag_is_held_back() -> None:
    made = parser()
    assert made.feed("a <tool") == [Delta(content="a")]
    assert made.feed("box> b") == [Delta(content=" <toolbox> b")]
    made = parser(is_open=True)
    assert made.feed("I thin") == [Delta(reasoning="I thin")]
    assert made.feed("k </thi") == [Delta(reasoning="k")]


def test_calls_beyond_the_first_are_dropped_on_demand() -> None:
    call = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    assert len(parse(HermesParser(most_calls=1), [call * 3])[2]) == 1
    assert len(parse(HermesParser(), [call * 3])[2]) == 3


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', ToolCall("f", '{"a": 1}')), ('{"name": "f"}', ToolCall("f", "{}")),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', ToolCall("f", '{"a": 1}')),
        ('{"name": "f", "arguments": [1]}', None),
        ('{"name": "f", "arguments": {"a": NaN}}', None), ('{"name": "f", "arguments": {"a": 1e999}}', None),
        ('{"name": 1}', None), ("[1]", None), ('"f"', None), ('{"name": ""}', None), ("[" * 100_000, None),
    ],
)  # fmt: skip
def test_what_counts_as_a_call(body: str, call: ToolCall | None) -> None:
    assert parse_call(body) == call


def test_templates_get_arguments_as_objects() -> None:
    made = arguments_as_object({"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}})
    assert made == {"id": "1", "function": {"name": "f", "arguments": {"a": 1}}}
    for call in ({}, {"function": 1}, {"function": {"name": "f", "arguments": "x"}}, {"function": {"arguments": {}}}):
        assert arguments_as_object(call) == call
