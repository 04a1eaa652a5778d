"""`response_format` as a grammar: every shape, and every wrong one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xllm_cli.core import Grammar
from xllm_cli.errors import RequestError
from xllm_cli.server.formats import grammar_of

SCHEMA = {"type": "object", "properties": {"é": {"type": "string"}}}


@pytest.mark.parametrize("wanted", [None, {}, {"type": "text"}])
def test_text_is_anything(wanted: Any) -> None:
    assert grammar_of(wanted, (1,)) is None


def test_the_kinds_of_grammar() -> None:
    made = grammar_of({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, (1, 2))
    assert made is not None and (made.kind, json.loads(made.text), made.end_ids) == ("json_schema", SCHEMA, (1, 2))
    assert grammar_of({"type": "regex", "regex": "a+"}, ()) == Grammar("regex", "a+")
    assert grammar_of({"type": "lark", "lark": "start: x"}, ()) == Grammar("lark", "start: x")
    made = grammar_of({"type": "json_object"}, ())
    assert made is not None and json.loads(made.text) == {"type": "object"}


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "xml"}, {"type": None}, {"type": ["text"]}, {"a": 1}, {"type": "json_schema"},
        {"type": "json_schema", "json_schema": []}, {"type": "json_schema", "json_schema": {"schema": "x"}},
        {"type": "json_schema", "json_schema": {"schema": None}}, {"type": "regex"}, {"type": "regex", "regex": ""},
        {"type": "regex", "regex": 1}, {"type": "lark", "lark": []}, {"type": "lark", "regex": "x"},
    ],
)  # fmt: skip
def test_any_other_shape_is_refused_by_name(wanted: Any) -> None:
    with pytest.raises(RequestError) as caught:
        grammar_of(wanted, ())
    assert (caught.value.status, caught.value.param) == (400, "response_format")
