"""Grammars: answers that match, and grammars that are wrong, slow or hostile and hurt nobody else."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import tiny_checkpoint
from tokenizers import pre_tokenizers

from xllm_cli import LLM
from xllm_cli.core import Grammar, Request, SamplingParams
from xllm_cli.engine import grammar as module
from xllm_cli.engine.grammar import Grammars, Guide

FLAGS = {"dtype": "float32", "block_size": 16, "enable_vmm_kvcache": True, "vmm_elastic": True}
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan"]}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = {ord(letter): token for token, letter in enumerate(LETTERS)}  # of printable ASCII


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny_checkpoint("llama"), max_cache_size=16 << 20, **FLAGS) as made:
        yield made


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(tiny_checkpoint("llama"), vocab_size=320, end_ids=(257,))
    yield made
    made.close()


def wanted(kind: Any, text: str, **fields: Any) -> SamplingParams:
    fields = {"max_tokens": 120, "temperature": 1.0, "seed": 5, "ignore_eos": True, **fields}
    return SamplingParams(grammar=Grammar(kind, text), **fields)


def settled(guide: Guide, seconds: float = 10.0) -> Guide:
    deadline = time.monotonic() + seconds
    while not guide.settle():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return guide


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_an_answer_is_in_its_language(llm: LLM, seed: int, ignore_eos: bool):
    asked = [
        wanted("json_schema", json.dumps(PERSON), seed=seed, ignore_eos=ignore_eos),
        wanted("regex", "[0-9]{3}-[a-c]{1,9}x", seed=seed, ignore_eos=ignore_eos),
        wanted("lark", 'start: "yes" | "no"', seed=seed, ignore_eos=ignore_eos, temperature=0.0),
    ]
    person, number, word = llm.generate(["Who?"] * 3, asked)
    assert {a.finish_reason for a in (person, number, word)} == {"stop"}
    assert set(json.loads(person.text)) == {"name", "age"} and 0 <= json.loads(person.text)["age"] <= 150
    assert re.fullmatch("[0-9]{3}-[a-c]{1,9}x", number.text) and word.text in ("yes", "no")
    assert not llm.engine.has_work


def test_constrained_rows_are_the_same_in_company_and_leave_others_alone(llm: LLM):
    asked = [wanted("json_schema", json.dumps(PERSON), seed=i) for i in range(6)]
    free = SamplingParams(max_tokens=40, temperature=0.9, seed=1, ignore_eos=True)
    alone = [llm.generate([[1, i]], each)[0].token_ids for i, each in enumerate(asked)]
    plain = llm.generate([[9, 9]], free)[0].token_ids
    together = llm.generate([*([1, i] for i in range(6)), [9, 9]], [*asked, free])
    assert [a.token_ids for a in together] == [*alone, plain]


def test_preemption_changes_no_constrained_answer():
    load = [[(17 * i + 3 * j) % 250 for j in range(60)] for i in range(12)]
    asked = [wanted("regex", "([a-f]{3}-){4,9}[0-9]+", seed=i, max_tokens=40) for i in range(12)]
    small = {"host_page_mode": "4k", "phy_page_granularity_size": 64 << 10}
    with LLM(tiny_checkpoint("llama"), max_cache_size=16 << 20, **FLAGS, **small) as made:
        free = made.generate(load, asked)
    with LLM(tiny_checkpoint("llama"), max_cache_size=28 * 12_288, **FLAGS, **small) as made:
        tight = made.generate(load, asked)
        assert made.snapshot.counters.preemptions > 0
        made.engine.check()
    assert [a.token_ids for a in tight] == [a.token_ids for a in free]


def test_penalties_min_tokens_and_logprobs_go_with_a_grammar(llm: LLM):
    asked = wanted("regex", "(a|b)*", min_tokens=20, presence_penalty=0.5, logprobs=2, temperature=0.0)
    answer = llm.generate(["x"], asked)[0]
    assert len(answer.token_ids) >= 20 and set(answer.text) <= {"a", "b"}
    assert any(token not in (97, 98) for score in answer.logprobs for token, _ in score.top), "raw logits are reported"


def test_a_complete_answer_ends_below_min_tokens(llm: LLM):
    answer = llm.generate(["x"], wanted("regex", "abc", min_tokens=50))[0]
    assert (answer.text, answer.finish_reason) == ("abc", "stop")


def test_an_answer_cut_off_is_the_beginning_of_a_right_one(llm: LLM):
    answer = llm.generate(["x"], wanted("regex", "abcdefghi", max_tokens=4))[0]
    assert (answer.text, answer.finish_reason) == ("abcd", "length")


SECRET = "donotrepeatme"
WRONG = [
    ("json_schema", "{"), ("json_schema", '"x"'), ("json_schema", "[1]"), ("json_schema", "\x00"),
    ("json_schema", json.dumps({"type": SECRET})), ("json_schema", json.dumps({"$ref": f"http://{SECRET}/x"})),
    ("json_schema", json.dumps({"$ref": "#"})), ("json_schema", '{"properties":{"a":' * 200 + "{}" + "}}" * 200),
    ("json_schema", "[" * 100_000),
    ("json_schema", json.dumps({"type": "number", "minimum": -1e308, "multipleOf": 1e-300})),
    ("json_schema", json.dumps({"enum": [f"v{i}" for i in range(20_000)]})),
    ("regex", f"({SECRET}"), ("regex", "(" * 20_000), ("regex", "(?=a)b"), ("regex", "a?" * 20_000),
    ("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}[x"),
    ("lark", ""), ("lark", f"start: {SECRET}"), ("lark", "start: start"), ("lark", "start: " + "(" * 20_000),
    ("lark", f'start: %json {{"type": "{SECRET}"}}'), ("lark", "\x00\xff %%%"), ("lark", "x" * 200_000),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_wrong_grammar_is_refused_by_name_and_not_repeated(grammars: Grammars, number: int):
    kind, text = WRONG[number]
    error = settled(grammars.start(Grammar(kind, text, param="response_format"))).error
    assert error is not None and (error.status, error.param) == (400, "response_format")
    assert SECRET not in error.message and len(error.message) < 300


DEEP = [
    ("lark", "start: r0\n" + "\n".join(f"r{i}:r{i + 1}" for i in range(8000)) + '\nr8000:"z"'),
    ("lark", "start: r0\n" + "\n".join(f"r{i}:r{i + 1}?" for i in range(8000)) + '\nr8000:"z"'),
    ("json_schema", json.dumps({
        "$ref": "#/$defs/a0",
        "$defs": {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(2000)}
        | {"a2000": {}},
    })),
    ("regex", "(a|b)*a(a|b){25}"), ("regex", "(a+)+$"), ("regex", "(.*a){30}"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(DEEP)))
def test_a_deep_grammar_crashes_nothing(grammars: Grammars, number: int):
    guide = settled(grammars.start(Grammar(*DEEP[number])))
    rng = np.random.default_rng(number)
    for _ in range(20):
        if guide.error is not None or guide.is_complete:
            break
        assert guide.mask is not None
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(guide.mask, np.uint8), bitorder="little"))
        guide.advance(int(rng.choice(allowed)))
        settled(guide)


def test_a_guide_is_rebuilt_by_telling_it_the_same_tokens(grammars: Grammars):
    asked = Grammar("json_schema", json.dumps(PERSON))
    first, second = grammars.start(asked), grammars.start(asked)
    masks: list[list[bytes | None]] = [[], []]
    for guide, seen in zip((first, second), masks, strict=True):
        for token in b'{"name":"Ada"':
            seen.append(settled(guide).mask)
            guide.advance(VOCABULARY[token])
    assert masks[0] == masks[1] and None not in masks[0]


def test_a_token_that_is_not_allowed_is_an_error(grammars: Grammars):
    guide = settled(grammars.start(Grammar("regex", "a")))
    guide.advance(VOCABULARY[ord("b")])
    assert settled(guide).error is not None


# --- grammars that take their time


def test_another_tokenizer_is_followed_from_then_on(grammars: Grammars, tmp_path: Path):
    def allowed() -> bytes:
        mask = settled(grammars.start(Grammar("regex", "a"))).mask
        assert mask is not None
        return mask

    before = allowed()
    grammars.move(tmp_path)  # which has none
    assert allowed() == before
    words = json.loads((tiny_checkpoint("llama") / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    under_way = settled(grammars.start(Grammar("regex", "b")))
    grammars.move(tmp_path)
    assert allowed() == under_way.mask != before


def test_a_slow_grammar_ends_at_its_deadline_and_its_thread_is_replaced(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
):
    hang = threading.Event()
    monkeypatch.setattr(module, "COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(module, "NUM_COMPILERS", 1)
    slow = Grammars(tiny_checkpoint("llama"), vocab_size=320, end_ids=(257,))
    with monkeypatch.context() as patch:
        patch.setattr(slow, "_compile", lambda *_: hang.wait(20))
        guide = settled(slow.start(Grammar("regex", "a")))
    assert guide.error is not None and (guide.error.status, guide.error.code) == (400, "grammar_too_slow")
    monkeypatch.setattr(module, "COMPILE_SECONDS", 10.0)
    assert settled(slow.start(Grammar("regex", "b"))).mask is not None
    hang.set()
    slow.close()


def test_grammars_that_find_no_thread_are_to_come_back(grammars: Grammars, monkeypatch: pytest.MonkeyPatch):
    hang = threading.Event()
    monkeypatch.setattr(module, "COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(module, "MAX_THREADS", 2)
    monkeypatch.setattr(grammars, "_compile", lambda *_: hang.wait(20))
    guides = [grammars.start(Grammar("regex", text)) for text in ("a", "b", "c")]
    errors = [settled(guide).error for guide in guides]
    assert [error and error.status for error in errors] == [400, 400, 503]
    hang.set()


def test_a_request_gone_while_it_compiles_leaves_nothing(llm: LLM):
    llm.engine.submit(Request(request_id="gone", prompt_ids=[1], sampling=wanted("regex", "a{3}b")))
    assert llm.engine.has_work and llm.engine.seconds_until_due() is not None
    llm.engine.abort("gone")
    llm.engine.step()
    assert not llm.engine.has_work
    llm.engine.check()


def test_others_keep_their_pace_beside_an_explosive_grammar(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "ADVANCE_SECONDS", 0.05)
    explosive = Grammar("lark", 'start: e\ne: e e | "a" | e e e | ""')
    hostile = SamplingParams(max_tokens=400, temperature=0.0, grammar=explosive, logit_bias=((VOCABULARY[97], 50.0),))
    llm.engine.submit(Request(request_id="hostile", prompt_ids=[1], sampling=hostile))
    llm.engine.submit(
        Request(request_id="plain", prompt_ids=[1], sampling=SamplingParams(max_tokens=300, ignore_eos=True))
    )
    last, gaps, ends = time.monotonic(), [], {}
    while llm.engine.has_work:
        for output in llm.engine.step().outputs:
            ends[output.request_id] = output.finish
            if output.request_id == "plain":
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
    assert len(gaps) == 300 and max(gaps[1:]) < 5  # the native library holds the interpreter for part of a second
    assert ends == {"plain": "length", "hostile": "error"}
