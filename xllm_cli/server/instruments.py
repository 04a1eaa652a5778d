"""What the API process itself counts and times, model by model. Owns the names; knows no routes.

Every series exists at zero from the start, or from when its model is there. Intervals are on this process's monotonic
clock; only the time from a request's admission to its first token is the engine's, and what is left of the wait before
it counts as queueing.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from xllm_cli.core import Counters, ModelActivity, Request, Snapshot

ENGINE = "0"  # the label of the one engine behind this server
LABELS = ("model_name", "engine")
FINISHED = ("stop", "length", "abort", "error")
WAITS = ("memory", "execution memory", "a slot", "a step")

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_MAPPING = (0.00001, 0.0001, 0.001, 0.01, 0.1, 1.0)
_SLEEPING = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)
_TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0, 128.0)
_HTTP_SECONDS = (0.1, 1.0, 10.0, 60.0)

_HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS),
    ("vllm:inter_token_latency_seconds", "Between two tokens of a sequence.", _GAPS),
    ("vllm:time_per_output_token_seconds", "As inter_token_latency, under its older name.", _GAPS),
    ("vllm:e2e_request_latency_seconds", "From a request's arrival to its end.", _SECONDS),
    ("vllm:request_queue_time_seconds", "Between submission and admission to the batch.", _SECONDS),
    ("vllm:request_prefill_time_seconds", "From admission to the first token.", _SECONDS),
    ("vllm:request_decode_time_seconds", "From the first token to the last.", _SECONDS),
    ("vllm:request_inference_time_seconds", "From admission to the last token.", _SECONDS),
    ("vllm:request_prompt_tokens", "Tokens of a sequence's prompt.", _TOKENS),
    ("vllm:request_generation_tokens", "Tokens generated for a sequence.", _TOKENS),
    ("vllm:request_params_n", "Choices asked for.", _CHOICES),
    ("vllm:request_params_max_tokens", "Limit on new tokens asked for.", _TOKENS),
    ("vllm:iteration_tokens_total", "Tokens computed in a step.", _TOKENS),
    ("xllm:sleep_seconds", "From a sleep asked for to the model asleep, its requests' end included.", _SLEEPING),
    ("xllm:wake_seconds", "From a wake-up asked for to the weights in their place.", _SLEEPING),
)


class Instruments:
    """Counters and histograms of one server, in one registry. What belongs to all its models, as their pool does, has
    the first model's name."""

    def __init__(self, model_id: str) -> None:
        """`model_id`: of the first model."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series beside each, which nobody reads
        self.registry = CollectorRegistry()
        self._histograms = {name: self._histogram(name, text, buckets) for name, text, buckets in _HISTOGRAMS}
        self._prompts = self._counter("vllm:prompt_tokens", "Prompt tokens processed, hits included.")
        self._ended = self._counter("vllm:request_success", "Sequences that ended, by reason.", "finished_reason")
        self._waits = self._counter(
            "xllm:admission_waits", "Times the queue's head began to wait, by reason.", "reason"
        )
        text = "Page changes of a step that mapped pages."
        self._maps = self._histogram("xllm:vmm_map_seconds", text, _MAPPING).labels(model_id, ENGINE)
        self.http = HttpInstruments(self.registry)
        self._models: dict[str, ModelInstruments] = {}
        self.first = self.of(model_id)

    def of(self, model_id: str) -> ModelInstruments:
        """Those of one model; from the first call on its series are shown."""
        if model_id not in self._models:
            self._models[model_id] = ModelInstruments(
                {name: histogram.labels(model_id, ENGINE) for name, histogram in self._histograms.items()},
                self._prompts.labels(model_id, ENGINE),
                {reason: self._ended.labels(model_id, ENGINE, reason) for reason in FINISHED},
                {reason: self._waits.labels(model_id, ENGINE, reason) for reason in WAITS},
            )
        return self._models[model_id]

    def forget(self, model_id: str) -> None:
        """A model is gone: its series are shown no more, and begin at zero should there be one of its name again. Who
        still holds its instruments observes into nothing."""
        if self._models.pop(model_id, None) is None:
            return
        for metric in (*self._histograms.values(), self._prompts):
            metric.remove(model_id, ENGINE)
        for metric, reasons in ((self._ended, FINISHED), (self._waits, WAITS)):
            for reason in reasons:
                metric.remove(model_id, ENGINE, reason)

    def mapped(self, seconds: float) -> None:
        """A step mapped pages."""
        self._maps.observe(seconds)

    def step(self, snapshot: Snapshot) -> None:
        """The engine reported its state."""
        for model_id, instruments in self._models.items():
            if (activity := activity_of(snapshot, model_id)) is not None:
                instruments.step(activity)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, LABELS, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, [*LABELS, *labels], registry=self.registry)


def activity_of(snapshot: Snapshot, model_id: str) -> ModelActivity | None:
    """One model's part of a snapshot; None before the engine has it. One that does not tell them apart has one."""
    if snapshot.models:
        return snapshot.models.get(model_id)
    return ModelActivity(
        counters=snapshot.counters,
        num_running=snapshot.num_running,
        num_waiting=snapshot.num_waiting,
        waiting_for=snapshot.waiting_for,
        waiting_bytes=snapshot.waiting_bytes,
    )


class ModelInstruments:
    """Counters and histograms of one model."""

    def __init__(
        self, histograms: dict[str, Histogram], prompts: Counter, ended: dict[str, Counter], waits: dict[str, Counter]
    ) -> None:
        self._histograms = histograms
        self._prompts = prompts
        self._ended = ended
        self._waits = waits
        self._counted = Counters()
        self._waiting_for = ""

    def observe(self, name: str, value: float) -> None:
        """One observation of a histogram."""
        self._histograms[name].observe(value)

    def prompt(self, num_tokens: int) -> None:
        """A prompt was run."""
        self._prompts.inc(num_tokens)
        self.observe("vllm:request_prompt_tokens", num_tokens)

    def ended(self, reason: str) -> None:
        """A sequence ended."""
        self._ended[reason].inc()

    def step(self, activity: ModelActivity) -> None:
        """The engine reported: what did the model compute since it last did, and who waits for what?"""
        before, now = self._counted, activity.counters
        computed = now.prompt_tokens_computed + now.generation_tokens
        computed -= before.prompt_tokens_computed + before.generation_tokens
        if computed > 0:
            self.observe("vllm:iteration_tokens_total", computed)
        self._counted = now
        if activity.waiting_for != self._waiting_for and activity.waiting_for in self._waits:
            self._waits[activity.waiting_for].inc()
        self._waiting_for = activity.waiting_for


class HttpInstruments:
    """HTTP requests by route; requests to unknown paths share the handler `none`. Only POST is timed: the rest reads
    what is there, and every series makes each scrape dearer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests", "HTTP requests answered.", ["method", "handler", "status"], registry=registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds", "From the head of a POST to the end of its answer.", ["handler"],
            buckets=_HTTP_SECONDS, registry=registry,
        )  # fmt: skip

    def announce(self, method: str, handler: str) -> None:
        """Let a route's series begin at zero."""
        self._requests.labels(method, handler, "2xx")
        if method == "POST":
            self._seconds.labels(handler)

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        """An answer ended."""
        self._requests.labels(method, handler, f"{status // 100}xx").inc()
        if method == "POST":
            self._seconds.labels(handler).observe(seconds)


class Timeline:
    """The moments of one sequence, observed as they come. `arrived` is when its HTTP request did (monotonic)."""

    def __init__(self, instruments: ModelInstruments, request: Request, arrived: float) -> None:
        self._instruments = instruments
        self._arrived = arrived
        self._submitted = time.monotonic()
        self._num_prompt = len(request.prompt_ids)
        self._first: float | None = None
        self._last = 0.0
        self._prefill = 0.0
        if request.sampling.max_tokens is not None:
            instruments.observe("vllm:request_params_max_tokens", request.sampling.max_tokens)

    def heard(self, num_tokens: int, prefill_seconds: float | None) -> None:
        """The engine sent tokens."""
        if not num_tokens:
            return
        now, observe = time.monotonic(), self._instruments.observe
        if self._first is None:
            self._first = self._last = now
            waited = now - self._submitted
            self._prefill = waited if prefill_seconds is None else min(prefill_seconds, waited)
            observe("vllm:time_to_first_token_seconds", now - self._arrived)
            observe("vllm:request_queue_time_seconds", waited - self._prefill)
            observe("vllm:request_prefill_time_seconds", self._prefill)
            self._instruments.prompt(self._num_prompt)
            num_tokens -= 1
        for _ in range(num_tokens):
            observe("vllm:inter_token_latency_seconds", (now - self._last) / num_tokens)
            observe("vllm:time_per_output_token_seconds", (now - self._last) / num_tokens)
        self._last = now

    def ended(self, reason: str, num_tokens: int) -> None:
        """It is over, after so many tokens in all."""
        self._instruments.ended(reason)
        if self._first is None:
            return
        observe = self._instruments.observe
        observe("vllm:e2e_request_latency_seconds", time.monotonic() - self._arrived)
        observe("vllm:request_decode_time_seconds", self._last - self._first)
        observe("vllm:request_inference_time_seconds", self._prefill + self._last - self._first)
        observe("vllm:request_generation_tokens", num_tokens)
