"""A choice's text: stop strings, hold-back, log probabilities; the same whatever the cut into steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import write_model

from xllm_cli.core import FinishReason, TokenLogprob
from xllm_cli.server.detokenizer import LogprobEntry, Piece, TextOptions, TextStream
from xllm_cli.server.tokenizer import Tokenizer

TEXT = st.text(alphabet="abé😀", max_size=24)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3).map(tuple)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_model(tmp_path_factory.mktemp("detokenizer") / "tiny"))


def run(
    tokenizer: Tokenizer, ids: list[int], options: TextOptions, step: int, finish: FinishReason = "length"
) -> tuple[list[Piece], int]:
    """All pieces of a choice whose tokens arrive `step` at a time, and the number of tokens it took."""
    stream, pieces = TextStream(tokenizer, options), []
    for start in range(0, max(len(ids), 1), step):
        part = ids[start : start + step]
        last = start + step >= len(ids)
        pieces.append(stream.feed(part, [TokenLogprob(i, -1.0) for i in part], finish if last else None))
        if pieces[-1].finish is not None:
            break
    return pieces, stream.num_tokens


def join(pieces: list[Piece]) -> tuple[str, list[LogprobEntry], FinishReason | None]:
    entries = [entry for piece in pieces for entry in piece.entries]
    return "".join(piece.text for piece in pieces), entries, pieces[-1].finish


def expected(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, FinishReason]:
    """Read character by character: the first stop that completes ends the text."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end if include else end - max(map(len, complete))], "stop"
    return text, "length"


@given(TEXT, STOPS, st.booleans(), st.integers(1, 9))
def test_the_first_stop_to_complete_ends_the_text(
    tokenizer: Tokenizer, text: str, stops: tuple[str, ...], include: bool, step: int
) -> None:
    pieces, _ = run(tokenizer, tokenizer.encode(text), TextOptions(stops, include), step)
    joined, _, finish = join(pieces)
    assert (joined, finish) == expected(text, stops, include)


@given(TEXT, STOPS, st.integers(2, 9))
def test_the_cut_into_steps_changes_nothing(tokenizer: Tokenizer, text: str, stops: tuple[str, ...], step: int) -> None:
    ids = tokenizer.encode(text)
    one, num_one = run(tokenizer, ids, TextOptions(stops), 1)
    many, num_many = run(tokenizer, ids, TextOptions(stops), step)
    assert join(one) == join(many)
    assert num_one == num_many


@given(TEXT, STOPS)
def test_log_probabilities_point_into_the_text(tokenizer: Tokenizer, text: str, stops: tuple[str, ...]) -> None:
    pieces, num_tokens = run(tokenizer, tokenizer.encode(text), TextOptions(stops), 1)
    joined, entries, finish = join(pieces)
    offsets = [entry.offset for entry in entries]
    assert offsets == sorted(offsets)
    assert all(offset < len(joined) for offset in offsets)
    assert finish == "stop" or len(entries) == num_tokens


def test_only_what_may_become_a_stop_is_held_back(tokenizer: Tokenizer) -> None:
    pieces, _ = run(tokenizer, tokenizer.encode("xaby"), TextOptions(("abc",)), 1)
    assert [piece.text for piece in pieces] == ["x", "", "", "aby"]


def test_what_was_held_back_comes_at_the_end(tokenizer: Tokenizer) -> None:
    pieces, _ = run(tokenizer, tokenizer.encode("xab"), TextOptions(("abc",)), 1)
    assert join(pieces)[0] == "xab"


def test_stop_tokens_do_not_show(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab")
    options = TextOptions(stop_token_ids=frozenset({ids[1]}))
    assert join(run(tokenizer, ids, options, 2, "stop")[0])[0] == "a"
    assert join(run(tokenizer, ids, options, 2, "length")[0])[0] == "ab"


def test_stop_strings_count_from_min_tokens_on(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abab")
    assert join(run(tokenizer, ids, TextOptions(("b",), min_tokens=3), 1)[0])[::2] == ("aba", "stop")
    assert join(run(tokenizer, ids, TextOptions(("b",), min_tokens=5), 1)[0])[::2] == ("abab", "length")


@given(TEXT, TEXT, st.integers(1, 5), st.integers(1, 5))
def test_an_echo_in_any_parts_is_one_text(tokenizer: Tokenizer, prompt: str, text: str, cut: int, step: int) -> None:
    ids, scores = tokenizer.encode(prompt), [TokenLogprob(i, -2.0) for i in tokenizer.encode(prompt)[1:]]
    stream = TextStream(tokenizer, TextOptions(("ab",), echo=True), ids)
    pieces = [stream.feed([], [], prompt_logprobs=scores[i : i + cut]) for i in range(0, len(scores), cut)]
    out = tokenizer.encode(text.replace("a", ""))
    for start in range(0, max(len(out), 1), step):
        part = out[start : start + step]
        pieces.append(
            stream.feed(part, [TokenLogprob(i, -1.0) for i in part], "length" if start + step >= len(out) else None)
        )
    joined, entries, finish = join(pieces)
    assert (joined, finish, stream.num_tokens) == (prompt + text.replace("a", ""), "length", len(out))
    assert [entry.logprob.token_id for entry in entries] == ids + out
    assert [entry.known for entry in entries] == [bool(i) or not ids for i in range(len(ids + out))]
    assert [entry.offset for entry in entries] == sorted(entry.offset for entry in entries)


def test_a_stop_in_the_prompt_stops_nothing(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, TextOptions(("ab",), echo=True), tokenizer.encode("xab"))
    assert stream.feed(tokenizer.encode("yabz"), None, "length") == Piece("xaby", [], "stop", "ab")
