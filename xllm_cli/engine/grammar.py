"""Grammars of constrained sequences: compiled and followed in threads of their own, so that the step loop never waits.

    Grammars.start ─ compile (thread) ─► Guide.mask ─ token drawn ─► Guide.advance ─ follow (thread) ─► Guide.mask
                              └──────────────────────► Guide.error ◄─────┴──────────────► Guide.is_complete

A guide's state is a function of its grammar and the tokens it was told. llguidance does the parsing; this module owns
its limits and its deadlines. Clients write the grammars: one that is wrong, too large or too slow ends its own requests
and nothing else. Knows neither scheduling nor logits.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from xllm_cli.core import Grammar
from xllm_cli.errors import RequestError

MAX_TEXT_BYTES = 128 << 10
COMPILE_SECONDS = 15.0  # milliseconds usually; the machine may be busy
ADVANCE_SECONDS = 3.0  # for one token
NUM_COMPILERS = 2
NUM_FOLLOWERS = 2
CLOSE_SECONDS = 10.0
MAX_THREADS = 8  # of a kind, those that hang included
STACK_BYTES = 256 << 20  # addresses only: the native compiler recurses along chains of rules
MAX_KEPT = 16

_WHITESPACE = r"( |\n[ \t]{0,40})?"  # without a bound a small model may write blanks until its tokens are used up
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`|/[^/]*/")
_WORD = re.compile(r"[^\s:;,.()…]{3,}")
_KEYWORDS = re.compile(
    r"type|properties|required|items|enum|const|pattern|format|minimum|maximum|multipleOf|anyOf|oneOf|allOf|not|\$ref|"
    r"additionalProperties|start|regex|lark|json|schema|string|object|array|number|integer|boolean|null"
)


class Threads:
    """Daemon threads with deep stacks. One that hangs in native code cannot be ended, only replaced."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._threads: list[threading.Thread] = []
        self._work: queue.SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = queue.SimpleQueue()

    def submit(self, future: Future[object], work: Callable[[], object]) -> None:
        """Have `work` done; its result goes into `future`."""
        while len(self._threads) < self._count:
            self._start()
        self._work.put((future, work))

    def replace_one(self) -> None:
        """A thread hangs; another takes its place, within bounds."""
        if len(self._threads) < MAX_THREADS:
            self._count += 1

    def close(self, seconds: float) -> None:
        """What is queued is dropped. The threads end, after so many seconds at most even those in native code: ending
        the interpreter under them would crash it."""
        with contextlib.suppress(queue.Empty):
            while (job := self._work.get_nowait()) is not None:
                job[0].cancel()
        for _ in self._threads:
            self._work.put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads.clear()

    def _start(self) -> None:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=self._run, name=f"xllm {self._name}", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
        self._threads.append(thread)

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # a panic of the native library is no Exception
                future.set_exception(error)
            else:
                future.set_result(result)


class _Place(NamedTuple):
    """Where a matcher is: what may come next, and whether nothing may."""

    matcher: LLMatcher
    mask: bytes
    is_complete: bool
    end_ids: tuple[int, ...] = ()


class Guide:
    """A sequence's way through its grammar. `mask` has a bit for each token that may come next; None: not known yet.
    Tokens of `end_ids` come where the text may end."""

    def __init__(self, future: Future[object], compilers: Threads, followers: Threads, *, param: str) -> None:
        self.mask: bytes | None = None
        self.is_complete = False
        self.end_ids: tuple[int, ...] = ()
        self.error: RequestError | None = None
        self._matcher: LLMatcher | None = None
        self._followers = followers
        self._param = param
        self._expect(future, compilers, COMPILE_SECONDS)

    @property
    def pending(self) -> Future[object] | None:
        """What it waits for."""
        return None if self.mask is not None or self.is_complete or self.error else self._future

    def advance(self, token_id: int) -> None:
        """A token was drawn; from here on it waits for the next mask."""
        assert self._matcher is not None
        self.mask = None
        future: Future[object] = Future()
        self._followers.submit(future, partial(_follow, self._matcher, token_id))
        self._expect(future, self._followers, ADVANCE_SECONDS)

    def settle(self) -> bool:
        """Look whether what it waits for is there; False while it waits."""
        if self.pending is None:
            return True
        if self._future.done():
            self._take(self._future)
        elif time.monotonic() > self._deadline:
            self._give_up()
        return self.pending is None

    def _expect(self, future: Future[object], threads: Threads, seconds: float) -> None:
        self._future = future
        self._threads = threads
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def _take(self, future: Future[object]) -> None:
        failure = future.exception()
        if failure is not None:
            self.error = failure if isinstance(failure, RequestError) else self._refusal("the grammar cannot be used")
            return
        place = future.result()
        assert isinstance(place, _Place)
        # the compiled grammar is shared by all that asked for it
        if self._matcher is None:
            self._matcher, self.end_ids = place.matcher.deep_copy(), place.end_ids
        self.mask, self.is_complete = place.mask, place.is_complete

    def _give_up(self) -> None:
        if self._future.running():
            self._threads.replace_one()
            self.error = self._refusal(f"the grammar took more than {self._seconds:g} s", "grammar_too_slow")
        else:
            self.error = RequestError(
                "too many grammars are being compiled", status=503, code="grammar_busy", retry_after=5
            )

    def _refusal(self, text: str, code: str = "invalid_grammar") -> RequestError:
        return RequestError(f"{self._param}: {text}", code=code, param=self._param)


class _Words:
    """A tokenizer's file, and what was read of it, by the tokens that end a text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokenizers: dict[tuple[int, ...], LLTokenizer] = {}


class Grammars:
    """Compiles grammars for a tokenizer and keeps the last ones."""

    def __init__(self, folder: str | Path, *, vocab_size: int, end_ids: Iterable[int]) -> None:
        """`folder` holds tokenizer.json, read when the first grammar comes; `end_ids` end a text."""
        self._words = _Words(Path(folder) / "tokenizer.json")
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._compilers = Threads(NUM_COMPILERS, "grammar compiler")
        self._followers = Threads(NUM_FOLLOWERS, "grammar")
        self._compiled: OrderedDict[Grammar, Future[object]] = OrderedDict()
        self._reading = threading.Lock()  # between compilers only; the loop never takes it

    def start(self, grammar: Grammar) -> Guide:
        """A guide whose grammar is being compiled."""
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = Future()
            self._compilers.submit(future, partial(self._compile, grammar, self._words))
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > MAX_KEPT:
            self._compiled.popitem(last=False)
        return Guide(future, self._compilers, self._followers, param=grammar.param)

    def move(self, folder: str | Path) -> None:
        """Compile what comes with the tokenizer in `folder`, if there is one. Guides under way keep theirs."""
        path = Path(folder) / "tokenizer.json"
        if path.is_file():
            self._words = _Words(path)
            self._compiled.clear()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Let the threads end. Those of either kind that have not after so many seconds do so when they can."""
        self._compilers.close(seconds)
        self._followers.close(seconds)

    # --- in the compilers' threads

    def _compile(self, grammar: Grammar, words: _Words) -> _Place:
        if len(grammar.text.encode()) > MAX_TEXT_BYTES:
            raise _invalid(grammar, f"it is longer than {MAX_TEXT_BYTES} bytes")
        tokenizer = self._tokenizer(words, tuple(sorted({*self._end_ids, *grammar.end_ids})))
        try:
            source = _source(grammar)
        except ValueError as error:
            raise _invalid(grammar, str(error)) from error
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise _invalid(grammar, matcher.get_error())
        # even an empty text ends with a token
        return _Place(matcher, mask, is_complete=False, end_ids=tuple(tokenizer.eos_tokens))

    def _tokenizer(self, words: _Words, end_ids: tuple[int, ...]) -> LLTokenizer:
        with self._reading:
            if end_ids not in words.tokenizers:
                words.tokenizers[end_ids] = LLTokenizer(
                    str(words.path), n_vocab=self._vocab_size, eos_token=list(end_ids) or None
                )
            return words.tokenizers[end_ids]


def wait_for(guides: Iterable[Guide], seconds: float) -> None:
    """Until no guide waits any more, but no longer than this."""
    waiting = [guide.pending for guide in guides if guide.pending is not None]
    if waiting:
        wait(waiting, timeout=seconds)


def _follow(matcher: LLMatcher, token_id: int) -> _Place:
    matcher.consume_token(token_id)
    is_complete = matcher.is_stopped()
    mask = b"" if is_complete else matcher.compute_bitmask()
    if matcher.is_error():
        raise RequestError("the grammar became too complex", code="grammar_too_complex")
    return _Place(matcher, mask, is_complete)


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": _WHITESPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def _limits() -> LLParserLimits:
    """Measured on schemas and on attacks: what compiles within these needs less than 200 MB and two seconds."""
    return LLParserLimits(
        initial_lexer_fuel=50_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _invalid(grammar: Grammar, reason: str) -> RequestError:
    """The compiler's reason, without what it repeats of the grammar."""
    first, *others = reason.strip().split("\n")
    text = _QUOTED.sub("…", " ".join([first, *(line for line in others if line.startswith("error: "))]))
    text = _WORD.sub(
        lambda word: "…" if word[0] in grammar.text and not _KEYWORDS.fullmatch(word[0]) else word[0], text
    )
    message = f"{grammar.param}: not a usable grammar: {text[:200]}"
    return RequestError(message, code="invalid_grammar", param=grammar.param)
