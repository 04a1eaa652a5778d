"""The nouns that cross a seam: between processes, or between engine, cache and worker.

Everything here is a frozen msgspec struct: it crosses a process as msgpack and can never be half changed. State that
only the engine owns (sequences, block tables) is not here. This module knows no device, no torch and no HTTP.

Longer than other files: it is the vocabulary of every seam, and a noun is read beside its neighbours.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

# --- requests: server → engine -------------------------------------------------------------------------------------


class Grammar(msgspec.Struct, frozen=True):
    """What an answer must be: text of a JSON schema, a regular expression, or a grammar in llguidance's Lark.

    `end_ids` are the tokens that may end it, besides the model's own. `param` names the request's field in errors.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    end_ids: tuple[int, ...] = ()
    param: str = "response_format"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when a sequence ends. Ranges are checked at the edge (server/protocol.py).

    `max_tokens` None means: as many as context and memory allow. `temperature` 0 is greedy. `top_k` 0 is off. `seed`
    None takes the engine's. `logprobs` None reports none, n reports the sampled token and the n likeliest.
    `stop_token_ids` holds the model's end tokens too unless the request ignores them (`ignore_eos`). `min_p` drops
    tokens less likely than that share of the likeliest. The presence and the frequency penalty are subtracted for
    what was generated, once and for each time; `repetition_penalty` divides the positive and multiplies the negative
    logits of the prompt's tokens too; `logit_bias` holds (token id, what is added to its logit). With `prompt_logprobs`
    the prompt's tokens are reported as `logprobs` reports new ones; only then `max_tokens` may be 0.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


class MediaSpan(msgspec.Struct, frozen=True):
    """A media item's place in the prompt, in tokens `[start, start + length)`, and the digest of its content."""

    start: int
    length: int
    digest: bytes


class Request(msgspec.Struct, frozen=True, tag="request", kw_only=True):
    """One sequence to generate. Choices of `n > 1` are separate requests with the same prompt and another `choice`.

    Where the engine goes by priority, a lower one is served first. `model` is the id of one of the engine's models, as
    in every command; "" is the first.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    choice: int = 0
    cache_salt: str = ""
    media: tuple[MediaSpan, ...] = ()
    priority: int = 0
    model: str = ""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget a request. Unknown ids are a no-op; shares one FIFO with Request, so order is kept."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the engine process now; the server has drained or given up."""


class SetLimit(msgspec.Struct, frozen=True, tag="set_limit"):
    """Cap KV at `bytes` from now on, that of `model` or, "", that of all models together; None lifts the cap. Answered
    by Done."""

    command_id: str
    bytes: int | None = None
    model: str = ""


class Trim(msgspec.Struct, frozen=True, tag="trim"):
    """Give back what no request uses, spares before cached blocks; `bytes` None is all of it, `model` "" means of all
    models. Answered by Done."""

    command_id: str
    bytes: int | None = None
    model: str = ""


class Sleep(msgspec.Struct, frozen=True, tag="sleep", kw_only=True):
    """Give the weights' pages back: level 1 keeps a copy on the host, 2 none; with `park` they are only set aside.

    `mode` is what becomes of open requests: refuse the command, wait for them, or abort them. Answered by Done.
    """

    command_id: str
    model: str = ""
    level: Literal[1, 2] = 1
    park: bool = False
    mode: Literal["refuse", "wait", "abort"] = "refuse"


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Bring the weights back. Answered by Done."""

    command_id: str
    model: str = ""


class Fork(msgspec.Struct, frozen=True, tag="fork", kw_only=True):
    """Serve the checkpoint at `model_path` as `model`, too, from the same pool. The weights of a path that is served
    already are shared. `level` 1 or 2: it sleeps at once, as after such a Sleep. Answered by Done with `ready`."""

    command_id: str
    model: str
    model_path: str
    level: Literal[0, 1, 2] = 0


class Remove(msgspec.Struct, frozen=True, tag="remove", kw_only=True):
    """Take `model` out, with all that it holds; its name is free then. The first model stays.

    `mode` is what becomes of open requests, as in Sleep. Answered by Done, `after` being absent.
    """

    command_id: str
    model: str
    mode: Literal["refuse", "wait", "abort"] = "refuse"


class UpdateWeights(msgspec.Struct, frozen=True, tag="update_weights", kw_only=True):
    """Exchange a model's weights between two steps for those of `model_path`, "" being where it came from; nothing
    computed with the old ones is used again. Answered by Done."""

    command_id: str
    model: str = ""
    model_path: str = ""


class Pause(msgspec.Struct, frozen=True, tag="pause", kw_only=True):
    """Run nothing of `model`, "" being all models, until Resume; newcomers queue. What runs is kept for then (its KV is
    given back and computed anew), aborted, or waited for. Answered by Done once nothing runs."""

    command_id: str
    model: str = ""
    mode: Literal["keep", "abort", "wait"] = "keep"


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """End a pause. Answered by Done."""

    command_id: str
    model: str = ""


Command = SetLimit | Trim | Sleep | Wake | Fork | Remove | UpdateWeights | Pause | Resume
ToEngine = Request | Abort | Shutdown | Command

# --- answers: engine → server --------------------------------------------------------------------------------------

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities of one position: the chosen token's, and `(id, logprob)` of the likeliest.

    `token_id` -1, from a rank only: the model's output is not a number, nothing was drawn.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class ErrorInfo(msgspec.Struct, frozen=True):
    """A RequestError in transit."""

    message: str
    status: int
    code: str
    param: str | None = None
    retry_after: int | None = None


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step did for one request. `finish` is set exactly once, on the last output of a request.

    `prompt_logprobs` are those of the next tokens of the prompt, counted from its second: the first has none. All of
    them come before or with the first generated token.
    `prefill_seconds`, on the first output only, is the time from the request's admission to its first token.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] = []
    finish: FinishReason | None = None
    error: ErrorInfo | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefill_seconds: float | None = None


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the engine became ready; they only grow."""

    steps: int = 0
    prompt_tokens_computed: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    evicted_blocks: int = 0
    pages_mapped: int = 0
    pages_unmapped: int = 0
    map_failures: int = 0
    prefill_chunks: int = 0
    exhausted_steps: int = 0


LimitedBy = Literal["arena", "max_cache_size", "max_memory_utilization", "limit", "pool", "free_memory"]


class VmmReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /vmm and LLM.memory(). Bytes unless named otherwise; DESIGN.md §7 has the equations.

    `budget` is what each limit in force lets be mapped now; `headroom` is the least of them. `neighbours` are the bytes
    `asked` of other engines of the device, `received` from them and `given` to them, and how long the last answer took.
    """

    device: str = "cpu"
    driver: str = ""
    mode: str = ""
    page_bytes: int = 0
    total: int = 0
    free: int = 0
    arena: int = 0
    physical: int = 0
    mapped: int = 0
    kv_live: int = 0
    kv_cached: int = 0
    kv_idle: int = 0
    kv_spare: int = 0
    weights: int = 0
    free_handles: int = 0
    parked: int = 0
    state: int = 0
    anon: int = 0
    execution_room: int = 0
    execution_peak: int = 0
    floor: int = 0
    reserve: int = 0
    limit: int | None = None
    headroom: int = 0
    headroom_limited_by: str = "arena"
    headroom_explained: str = ""
    budget: dict[str, int] = {}
    possible: int = 0
    possible_limited_by: str = "arena"
    ranks: list[dict[str, int]] = []
    models: dict[str, dict[str, int | str]] = {}
    neighbours: dict[str, int] = {}
    tensors: list[dict[str, int | str]] = []
    pages_mapped_total: int = 0
    pages_unmapped_total: int = 0
    map_failures_total: int = 0
    evicted_blocks_total: int = 0
    preemptions_total: int = 0


class ModelActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One model's part of a Snapshot; its memory is in `memory.models`. Fields as in Snapshot."""

    counters: Counters
    state: str = "awake"
    is_paused: bool = False
    num_running: int = 0
    num_waiting: int = 0
    waiting_for: str = ""
    waiting_bytes: int = 0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state after a step; the server answers /vmm, /metrics and /health from the last one.

    `waiting_for` is what keeps the head of the queue from running, `waiting_bytes` how much KV it waits for if that is
    memory. Numbers are those of all models, each model's own are in `models` by its id, the first being the engine's
    first.
    """

    memory: VmmReport
    counters: Counters
    num_running: int = 0
    num_waiting: int = 0
    waiting_for: str = ""
    waiting_bytes: int = 0
    healthy: bool = True
    reason: str = ""
    models: dict[str, ModelActivity] = {}


class StepEvents(msgspec.Struct, frozen=True, tag="step"):
    """One message per step: every request's output together with the snapshot that includes it.

    `map_seconds` is how long the step's page changes took; None if it mapped nothing.
    """

    outputs: list[Output]
    snapshot: Snapshot | None = None
    map_seconds: float | None = None


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """The phase a starting engine is in, for /health and the log. `seconds` since the engine started."""

    phase: str
    seconds: float


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """The engine serves. `max_model_len` in tokens; `capacity_tokens` is what the cache could ever hold."""

    model_id: str
    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    capacity_tokens: int
    snapshot: Snapshot


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The engine's loop turns, although it has nothing else to tell."""


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot go on; the process ends with `exit_code` after this."""

    message: str
    exit_code: int = 1


class Done(msgspec.Struct, frozen=True, tag="done", kw_only=True):
    """A command took effect, or could not (`error`). `freed` bytes went back to the device, `taken` came from it;
    `before` and `after` are the model's states, `snapshot` is the whole state after it. `ready` describes a fork's
    model, also one that was there already; `message` is what is worth telling besides."""

    command_id: str
    seconds: float
    snapshot: Snapshot
    freed: int = 0
    taken: int = 0
    before: str = ""
    after: str = ""
    error: ErrorInfo | None = None
    ready: Ready | None = None
    message: str = ""


FromEngine = StepEvents | Loading | Ready | Heartbeat | Fatal | Done

# --- memory: model → cache → worker --------------------------------------------------------------------------------


class TensorSpec(msgspec.Struct, frozen=True):
    """One KV tensor. Block b covers bytes `[b * bytes_per_block, (b + 1) * bytes_per_block)`."""

    name: str
    bytes_per_block: int


class CacheSpec(msgspec.Struct, frozen=True):
    """What a model needs of the cache: its KV tensors, tokens per block, and resident per-sequence state in bytes."""

    block_size: int
    tensors: tuple[TensorSpec, ...]
    state_bytes: int = 0

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all tensors."""
        return sum(t.bytes_per_block for t in self.tensors)


class PageRef(NamedTuple):
    """Page `page` (counted from the arena's start) of tensor `tensor` (its index in the CacheSpec)."""

    tensor: int
    page: int


class PageDelta(msgspec.Struct, frozen=True):
    """The page changes of one step: unmap first, then map. Sorted, disjoint.

    `copies` follow them, before any row: the KV of block `a` goes to block `b` for each `(a, b)`, in every tensor.
    """

    map: tuple[PageRef, ...] = ()
    unmap: tuple[PageRef, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.map or self.unmap or self.copies)


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank saw after a step, in bytes. DESIGN.md §7 defines `execution_room`.

    `free` is after the step, `free_before` before it. `execution_peak` is the most that a step so far needed beyond
    what it began with. `owned` counts the distinct handles times page size (mapped, free and parked), `free_handles`
    those not mapped. `allocated` is what the system says the pool holds; a difference to `owned` is a leak or a page
    not yet given back. `tensors` are in use and `reserved` taken by an allocator beside the pool that tells: else 0.
    """

    total: int
    free: int
    free_before: int = 0
    anon: int = 0
    execution_room: int = 0
    execution_peak: int = 0
    owned: int = 0
    free_handles: int = 0
    allocated: int = 0
    tensors: int = 0
    reserved: int = 0


# --- one step: scheduler → worker → scheduler ----------------------------------------------------------------------


class LogitChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What is done to a row's logits before its token is drawn; a function of the sequence's own tokens.

    `history` is the sequence so far, of which the first `num_prompt` tokens are its prompt; empty without penalties.
    `allowed` has a bit for each token, lowest first, that a grammar lets come next; None where there is no grammar.
    """

    history: list[int] = []
    num_prompt: int = 0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: bytes | None = None


class RowSampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a row's next token is drawn. Randomness is Philox(seed, choice, position): no generator state."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    position: int = 0
    logprobs: int | None = None
    forbidden: tuple[int, ...] = ()
    changes: LogitChanges | None = None


class PromptScoring(msgspec.Struct, frozen=True):
    """Tokens of the prompt whose log probabilities are wanted: the row's token `first + i` predicts `targets[i]`.

    `top` is how many of the likeliest are reported beside each.
    """

    first: int
    targets: list[int]
    top: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's part of a step: run `token_ids` at absolute positions `start …`, all their KV in `blocks`.

    `sampling` None is a prefill chunk that does not end its prompt: KV is written, no token is drawn.
    """

    sequence: int
    token_ids: list[int]
    start: int
    blocks: list[int]
    sampling: RowSampling | None = None
    scoring: PromptScoring | None = None


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Without rows it is a maintenance step: page changes and an observation only.

    `keep_free` is what elastic growth must leave free on the device (floor + execution room + reserve), in bytes.
    `short` is what somebody wanted besides and free memory did not allow: caches outside the pool are to be emptied.
    """

    step: int
    delta: PageDelta = PageDelta()
    rows: tuple[Row, ...] = ()
    keep_free: int = 0
    short: int = 0


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a plan. `mapped` False: no row ran, this delta's maps were undone, its unmaps stand.

    `tokens` has one entry per row with `sampling`, `scores` one per row with `scoring`, in row order. `stuck` are pages
    whose unmap failed (still mapped). `exhausted` says why the rows were broken off although their pages are mapped:
    the device had no memory left to compute in. What they wrote counts for nothing then.
    """

    step: int
    mapped: bool
    observation: Observation
    tokens: tuple[TokenLogprob, ...] = ()
    scores: tuple[list[TokenLogprob], ...] = ()
    stuck: tuple[PageRef, ...] = ()
    shortage: str = ""
    exhausted: str = ""
    map_seconds: float | None = None
