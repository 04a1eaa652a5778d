"""Text to token ids and back, from the tokenizer files of a Hugging Face folder. Knows nothing of HTTP or requests.

Only the `tokenizers` package reads `tokenizer.json`; transformers is never imported. Byte-level tokenizers decode
byte by byte (exact and constant time per token), all others through a small window (`WindowDecoder`).
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from xllm_cli.errors import ModelError, RequestError
from xllm_cli.server.habits import habits_of
from xllm_cli.server.templates import ChatTemplate, TemplateError

REPLACEMENT = "\ufffd"
LETTERS_PER_TOKEN = 16  # far above any language's average, so the beginning of a hopeless text is hopeless
MAX_SEAM_TOKENS = 64  # how many tokens a cut in the middle of a word may add
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "config.json",
    "generation_config.json",
)  # fmt: skip
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class IncrementalDecoder(Protocol):
    """Token ids in, text out as soon as it is certain. The join of all texts is the text of all ids."""

    def feed(self, token_id: int) -> str:
        """The text that became certain with this token; empty while a character is incomplete."""

    def flush(self) -> str:
        """The end of the text; an incomplete character becomes U+FFFD."""


class Tokenizer:
    """A model's tokenizer, its end tokens and its chat template.

    `chat_refusal` says why there is no usable chat template; None when chat works. `chat_template` is its source,
    `habits` what the model writes besides content.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        eos_token_ids: Iterable[int],
        *,
        tool_call_parser: str = "",
        reasoning_parser: str = "",
    ) -> None:
        self._backend = backend
        self.special_tokens = _special_tokens(config)
        declared = backend.token_to_id(self.special_tokens.get("eos_token", ""))
        self.eos_token_ids = tuple(sorted({*eos_token_ids, *([] if declared is None else [declared])}))
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._byte_of = _byte_alphabet() if _is_byte_level(backend) else None
        self.chat_refusal: str | None = "this model has no chat template; use /v1/completions"
        self._template: ChatTemplate | None = None
        self.chat_template: str | None = None
        self._compile_template(config.get("chat_template"))
        self.habits = habits_of(self.chat_template, tool_call_parser, reasoning_parser)
        self.digest = b""  # of the files it was made from, see digest_of()

    @classmethod
    def from_folder(cls, folder: str | Path, *, tool_call_parser: str = "", reasoning_parser: str = "") -> Tokenizer:
        """Read `tokenizer.json` and what lies beside it; the parsers are the flags of these names. ModelError when it
        is missing or broken."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not folder.is_dir():
            raise ModelError(f"model folder {folder} does not exist; `xllm fetch` brings a small one")
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json; a model folder in the Hugging Face layout is needed")
        digest = digest_of(folder)  # before anything is read: what changes meanwhile differs the next time
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception, nothing narrower exists
            raise ModelError(f"{path} cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
        jinja = folder / "chat_template.jinja"
        if jinja.is_file():
            config["chat_template"] = jinja.read_text(encoding="utf-8")
        ends = _eos_token_ids(folder)
        made = cls(backend, config, ends, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser)
        made.digest = digest
        return made

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; the model's own table may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True, *, enough: int | None = None) -> list[int]:
        """Token ids of a text; a long one belongs in a thread (the GIL is released).

        With `enough`, a text that certainly has more tokens than that may be answered with those of its beginning: a
        caller that will refuse it need not wait for the rest.
        """
        if enough is not None and len(text) > enough * LETTERS_PER_TOKEN:
            beginning = self._encode(text[: enough * LETTERS_PER_TOKEN], add_special_tokens)
            if len(beginning) > enough + MAX_SEAM_TOKENS:
                return beginning
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch form releases the GIL, the single one does not (tokenizers 0.23); "fast" leaves out offsets.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all ids at once. Ids beyond the tokenizer's table have no text."""
        decoder = self.stream(skip_special_tokens)
        return "".join(decoder.feed(token_id) for token_id in token_ids) + decoder.flush()

    def stream(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder for one sequence."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if self._byte_of is not None:
            return ByteDecoder(self, skipped)
        return WindowDecoder(self._backend, skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; a part of a character is possible, an unknown id has none."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of is not None:
            if all(letter in self._byte_of for letter in token):
                return bytes(self._byte_of[letter] for letter in token)
            return token.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()

    def token_text(self, token_id: int) -> str:
        """The text of one token alone; U+FFFD where it holds only a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of the token that is exactly this text, None if there is none."""
        return self._backend.token_to_id(text)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
    ) -> str:
        """The prompt text of a conversation; encode it with `add_special_tokens=False`. RequestError 400 if refused.

        With `continues` the text ends where the last message does, for the model to go on with it.
        """
        if self._template is None:
            raise RequestError(self.chat_refusal or "", code="chat_template_missing", param="messages")
        try:
            if continues:
                return self._template.render_open(messages, variables=variables)
            return self._template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)
        except TemplateError as error:
            raise RequestError(str(error), code="chat_template_error", param="messages") from error

    def _compile_template(self, source: Any) -> None:
        if isinstance(source, list):  # several named templates, as some hub folders have
            source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
        if not isinstance(source, str):
            return
        self.chat_template = source
        try:
            self._template = ChatTemplate(source, self.special_tokens)
            self.chat_refusal = None
        except TemplateError as error:
            self.chat_refusal = str(error)


class ByteDecoder:
    """Byte-level tokens through the standard incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """Any other tokenizer: decode a few tokens with and without the newest and release the difference.

    ids  … | context | pending … newest |      `_ids` holds context and pending; `_num_context` of them are released.
    The context keeps what the decoder does at the start of a text (dropping a space) out of the difference. Text that
    ends in U+FFFD may be half a character and waits, at most `MAX_PENDING` tokens.
    """

    MAX_PENDING = 16

    def __init__(self, backend: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._backend = backend
        self._skipped = skipped
        self._ids: list[int] = []
        self._num_context = 0

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._pending_text()
        pending = len(self._ids) - self._num_context
        if not text or (text.endswith(REPLACEMENT) and pending < self.MAX_PENDING):
            return ""
        self._ids = self._ids[self._num_context :]
        self._num_context = len(self._ids)
        return text

    def flush(self) -> str:
        text = self._pending_text()
        self._num_context = len(self._ids)
        return text

    def _pending_text(self) -> str:
        whole = self._decode(self._ids)
        return whole[len(self._decode(self._ids[: self._num_context])) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False) if token_ids else ""


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    if backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    parts = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    return [part.get("type") for part in parts] == ["ByteLevel"]


def _byte_alphabet() -> dict[str, int]:
    """The printable letter of every byte, as byte-level BPE writes its vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(0x100 + i): byte for i, byte in enumerate(shifted)})
    return letters


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def digest_of(folder: str | Path) -> bytes:
    """Of the files that from_folder() reads, those that are there. ModelError for one that cannot be read."""
    found = hashlib.blake2b(digest_size=16)
    for path in (Path(folder) / name for name in FILES):
        try:
            data = path.read_bytes() if path.is_file() else b""
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        found.update(f"{path.name} {len(data)} ".encode() + data)
    return found.digest()


def _eos_token_ids(folder: Path) -> set[int]:
    """End tokens of config.json (also a nested text_config) and generation_config.json; either may hold a list."""
    config = _read_json(folder / "config.json")
    found: set[int] = set()
    for source in (config, config.get("text_config") or {}, _read_json(folder / "generation_config.json")):
        value = source.get("eos_token_id")
        found.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    return found


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value
