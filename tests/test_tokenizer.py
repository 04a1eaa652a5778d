"""Tokenizer, incremental decoding and chat templates."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import write_model
from tokenizers import decoders, models, normalizers

from xllm_cli.errors import ModelError, RequestError
from xllm_cli.server.templates import ChatTemplate, TemplateError
from xllm_cli.server.tokenizer import REPLACEMENT, Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tokenizer") / "tiny")


@pytest.fixture(scope="module")
def byte_level(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: words marked by U+2581, unknown characters as byte tokens, the first space dropped."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "é", "ab", "\u2581ab"]
    merges = [("a", "b"), ("\u2581", "a"), ("\u2581", "ab")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, {}, [])


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = tokenizer.stream()
    return [*(decoder.feed(token_id) for token_id in ids), decoder.flush()]


@given(st.lists(st.integers(0, 319), max_size=40))
def test_byte_level_stream_joins_to_the_backends_text(byte_level: Tokenizer, folder: Path, ids: list[int]) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = streamed(byte_level, ids)
    whole = backend.decode(ids, skip_special_tokens=True)
    assert "".join(pieces) == whole
    assert REPLACEMENT in whole or not any(REPLACEMENT in piece for piece in pieces)


@given(st.text())
def test_text_survives_both_kinds_of_tokenizer(byte_level: Tokenizer, byte_fallback: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text)) == text
    plain = text.replace("\u2581", "")
    assert byte_fallback.decode(byte_fallback.encode(plain)) == plain


@given(st.text(alphabet="a bé😀漢", max_size=12))
def test_byte_fallback_never_shows_half_a_character(byte_fallback: Tokenizer, text: str) -> None:
    pieces = streamed(byte_fallback, byte_fallback.encode(text))
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert pieces[-1] == ""  # nothing was held back for longer than it had to be


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_truncated_character_is_replaced_only_at_the_end(
    byte_level: Tokenizer, byte_fallback: Tokenizer, cut: int
) -> None:
    for tokenizer in (byte_level, byte_fallback):
        pieces = streamed(tokenizer, tokenizer.encode("a😀")[:-cut])
        assert REPLACEMENT not in "".join(pieces[:-1])
        assert pieces[-1].startswith(REPLACEMENT)


def test_a_long_run_of_broken_bytes_is_not_held_back_for_ever(byte_fallback: Tokenizer) -> None:
    broken = byte_fallback.encode("\u00ff")[-1]  # the last byte of a character, which never starts one
    pieces = streamed(byte_fallback, [broken] * 100)
    assert set("".join(pieces)) == {REPLACEMENT}
    assert any(pieces[:50])


def test_token_bytes(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    for tokenizer in (byte_level, byte_fallback):
        ids = tokenizer.encode("a 😀")
        assert b"".join(map(tokenizer.token_bytes, ids)).lstrip() == "a 😀".encode()
    assert byte_level.token_bytes(319) == b""
    assert byte_level.token_bytes(257) == b"<|eos|>"


def test_a_long_text_is_encoded_without_stopping_other_threads(byte_level: Tokenizer) -> None:
    started, last, longest = time.monotonic(), time.monotonic(), 0.0
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(byte_level.encode, "x" * 500_000)
        while not encoding.done():
            time.sleep(0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
    assert longest < (time.monotonic() - started) * 0.9


def test_a_hopeless_text_is_encoded_in_part(byte_level: Tokenizer) -> None:
    assert 100 < len(byte_level.encode("x" * 100_000, enough=100)) < 100_000
    assert len(byte_level.encode("x" * 1_000, enough=1_000)) == 1_000
    assert len(byte_level.encode("x" * 1_000)) == 1_000


def test_special_tokens_are_shown_only_when_asked(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|eos|>b")
    assert ids[1] == 257
    assert byte_level.decode(ids) == "ab"
    assert byte_level.decode(ids, skip_special_tokens=False) == "a<|eos|>b"


def test_end_tokens_of_all_files_count(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 5}}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    assert Tokenizer.from_folder(folder).eos_token_ids == (5, 6, 7, 257)


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", "{"), ("tokenizer_config.json", "[]"), ("generation_config.json", "\x00")]
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    folder = write_model(tmp_path / "m")
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=name):
        Tokenizer.from_folder(folder)


def test_a_missing_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.from_folder(folder).encode("seven c")) == 7


def test_chat_renders_the_folders_template(byte_level: Tokenizer) -> None:
    text = byte_level.chat([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert not byte_level.chat([{"role": "user", "content": "hi"}], add_generation_prompt=False).endswith("assistant\n")


def test_a_template_that_raises_is_the_clients_error(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no cows") as caught:
        byte_level.chat([{"role": "cow", "content": "moo"}])
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("template", "reason"), [(None, "no chat template"), ("{% if", "compile"), ("{{ 1 / 0 }}", "refuses")]
)
def test_without_a_usable_template_chat_says_why(tmp_path: Path, template: str | None, reason: str) -> None:
    tokenizer = Tokenizer.from_folder(write_model(tmp_path / "m", template))
    assert reason in (tokenizer.chat_refusal or "")
    with pytest.raises(RequestError, match=reason):
        tokenizer.chat([{"role": "user", "content": "hi"}])


def test_the_jinja_file_and_named_templates_are_found(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", None)
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_folder(folder).chat([{"role": "user", "content": ""}]) == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_folder(folder).chat([{"role": "user", "content": ""}]) == "J"


def test_templates_have_what_the_hub_expects() -> None:
    source = (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}"
        "{% generation %}{{ {'é': '<&>'} | tojson }}{% endgeneration %}{{ bos_token }}{{ strftime_now('%Y')[:2] }}"
        "{{ tools is none }}{{ enable_thinking }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    text = template.render([{"role": "user", "content": ""}], variables={"enable_thinking": 3})
    assert text == '{"é": "<&>"}<s>20True3'


@pytest.mark.parametrize(
    "attack", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ messages.clear() }}"]
)
def test_templates_run_in_a_sandbox(attack: str) -> None:
    with pytest.raises(TemplateError, match="refuses"):
        ChatTemplate(attack, {})


def test_a_message_is_continued_where_it_ends(byte_level: Tokenizer) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi there \n"}]
    assert byte_level.chat(talk, continues=True).endswith("<|im_start|>assistant\nhi there \n")


@pytest.mark.parametrize("last", [{"role": "assistant", "content": None}, {"role": "cow", "content": "moo"}])
def test_a_message_that_cannot_be_continued_is_the_clients_error(byte_level: Tokenizer, last: dict[str, str]) -> None:
    with pytest.raises(RequestError) as caught:
        byte_level.chat([last], continues=True)
    assert (caught.value.status, caught.value.code) == (400, "chat_template_error")


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    template = ChatTemplate("{{ messages[0].role }}", {})
    with pytest.raises(TemplateError, match="cannot be continued"):
        template.render_open([{"role": "user", "content": "x"}])
