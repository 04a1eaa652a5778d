"""The loop's body: one step from requests to tokens. One thread owns everything here; there are no locks.

Names the stages; what a request may ask for, scheduling, memory and execution are the admission's, the scheduler's, the
cache manager's and the group's business.

Longer than other files: all that may be asked of a model is here, and most of it is said, not done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

from xllm_cli.cache.manager import CacheManager
from xllm_cli.core import Output, PageDelta, Request, Snapshot, StepEvents, StepPlan, StepResult
from xllm_cli.engine.admission import Admission, ServingLimits, mappable_bytes
from xllm_cli.engine.grammar import Grammars
from xllm_cli.engine.guided import Guided
from xllm_cli.engine.needs import Needs
from xllm_cli.engine.notices import Notices
from xllm_cli.engine.report import Reporter
from xllm_cli.engine.scheduler import Scheduler
from xllm_cli.engine.sequence import Sequence, refusal
from xllm_cli.engine.slumber import LIGHT, NO_HABITS, Bed, Habits, Mode, Slumber
from xllm_cli.engine.steps import Steps
from xllm_cli.errors import RequestError
from xllm_cli.neighbours.peers import PeerCounters
from xllm_cli.worker.group import Group
from xllm_cli.worker.sampler import philox
from xllm_cli.worker.sharing import Loaded

log = logging.getLogger(__name__)

COMPILE_POLL_SECONDS = 0.005
MEMORY_POLL_SECONDS = 0.05  # while a request waits for memory, look again this often (DESIGN.md §8)


class Engine(Steps):
    """submit and abort between steps; step while there is work; the outputs say what happened."""

    def __init__(  # noqa: PLR0913 - the parts of an engine
        self,
        scheduler: Scheduler,
        cache: CacheManager,
        group: Group,
        *,
        limits: ServingLimits,
        reporter: Reporter,
        grammars: Grammars,
        habits: Habits = NO_HABITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._group = group
        self._limits = limits
        self._reporter = reporter
        self._clock = clock
        self._admission = Admission(cache, limits)
        self._sequences: dict[str, Sequence] = {}
        self._guided = Guided(grammars, scheduler.add)
        self._arrivals = 0
        self._starved_since: float | None = None
        self._has_run = False
        self._notices = Notices(clock)
        self._slumber = Slumber(cache, group.weights, habits)
        self.needs = Needs(cache, scheduler, self._slumber)
        self._late: list[Output] = []  # of requests that a command ended, for the next step's events
        self.is_paused = False
        self.gives_way = False  # admits nobody and does not wake, so that another model gets its turn

    # --- between steps

    def submit(self, request: Request) -> Output | None:
        """Queue a request; an error output if it can never be served."""
        try:
            self._check_state(request.request_id)
            max_tokens = self._admission.check(request)
        except RequestError as error:
            return refusal(request.request_id, error)
        self._arrivals += 1
        sequence = Sequence(
            number=self._arrivals,
            request=request,
            table=self._cache.open(salt=request.cache_salt, media=request.media),
            max_tokens=max_tokens,
            seed=self._seed(request),
            queued_at=self._clock(),
        )
        self._sequences[request.request_id] = sequence
        if request.sampling.grammar is None:
            self._scheduler.add(sequence)
        else:
            self._guided.add(sequence)
        return None

    def abort(self, request_id: str) -> None:
        """Forget a request; its blocks are free before the next step. Unknown ids are a no-op."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._scheduler.remove(sequence)
            self._guided.forget(request_id)

    def abort_all(self, error: RequestError) -> list[Output]:
        """Forget every request; the last output of each, for whoever still listens."""
        ids = list(self._sequences)
        for request_id in ids:
            self.abort(request_id)
        return [refusal(request_id, error) for request_id in ids]

    def end_requests(self, error: RequestError) -> None:
        """abort_all(), by a command: the next step tells whoever still listens."""
        self._late += self.abort_all(error)

    def take_late(self) -> list[Output]:
        """What the next step would have told of ended requests, if none comes."""
        late, self._late = self._late, []
        return late

    def step(self) -> StepEvents:
        """plan → execute → commit. A plan whose pages could not be had is made again without growth; one that ran out
        of execution memory is broken off, and the next is smaller.

        With nothing to run it still looks at memory, and gives back what is due: neighbours come and go.
        """
        self._rest_if_tired()
        if self.wants_to_wake:
            self.stir()
        self._scheduler.closed_by = self._closed_by()
        ended = self.take_late() + self._follow_grammars()
        for _ in range(2):
            plan = self._scheduler.plan(self._clock())
            result = self._execute(plan)
            self._has_run = bool(plan.rows)
            self._tell_shortage(plan, result)
            if result.mapped:
                outputs = self._conclude(plan, result)
                return StepEvents(ended + outputs + self._expire(), self.snapshot(), result.map_seconds)
            self._scheduler.rollback(plan, result)
        return StepEvents(ended + self._expire(), self.snapshot())

    def _conclude(self, plan: StepPlan, result: StepResult) -> list[Output]:
        if result.exhausted:
            self._scheduler.break_off(plan, result)
            return []
        outputs = self._scheduler.commit(plan, result)
        self._forget_finished(outputs)
        return outputs

    def _tell_shortage(self, plan: StepPlan, result: StepResult) -> None:
        """A line in the log for what keeps growth or a step from what it wants, when that changes."""
        if not result.mapped:
            text = "step %d could not map its pages: %s"
            self._notices.say("map", "", text, plan.step, result.shortage, level=logging.WARNING)
        elif result.exhausted:
            text = "step %d of %d rows ran out of execution memory and is computed anew in smaller steps: %s"
            self._notices.say("run", "", text, plan.step, len(plan.rows), result.exhausted, level=logging.WARNING)
        if short := self._scheduler.short_bytes:
            room = self._cache.headroom()
            text = "%d bytes of KV cache are wanted and %d may be mapped in whole pages: limited by %s (%s)"
            values = short, mappable_bytes(self._cache, room), room.limited_by, self._cache.explain_headroom()
            self._notices.say("growth", room.limited_by, text, *values)

    def _execute(self, plan: StepPlan) -> StepResult:
        try:
            return self._group.execute(plan)
        except BaseException:  # an interrupt, a broken kernel: no row ran, and the ranks know which pages moved
            self._scheduler.rollback(plan, self._group.break_off(plan))
            raise

    def _follow_grammars(self) -> list[Output]:
        outputs = self._guided.follow() if self._guided else []
        for output in outputs:
            self.abort(output.request_id)
        return outputs

    def seconds_until_due(self) -> float | None:
        """How long the loop may sleep: 0 while rows run, None if nothing is due before a message comes."""
        if self._has_run and (self._scheduler.running or (self._scheduler.waiting and not self.is_paused)):
            return 0.0  # what waits may have got the slot or the memory of those that just ended
        if self._late:
            return 0.0
        if self._scheduler.running and self._guided:
            return 0.0  # the step itself waits for grammars
        now = self._clock()
        deadline = self._cache.next_deadline(now)
        due = [] if deadline is None else [max(0.0, deadline - now)]
        tired = self._slumber.seconds_until_tired(now, is_busy=self.has_work)
        due += [] if tired is None else [tired]
        if self._guided.is_compiling:
            due.append(COMPILE_POLL_SECONDS)
        if self._is_watching():
            due.append(MEMORY_POLL_SECONDS)
        return min(due, default=None)

    def drain(self, deadline: float) -> list[Output]:
        """Step until nothing runs or waits, or until `deadline` of the clock; everything that came out."""
        outputs: list[Output] = []
        while self.has_work and self._clock() < deadline:
            outputs += self.step().outputs
            self.rest()
        return outputs

    def set_limit(self, nbytes: int | None) -> None:
        """Cap KV bytes (None: no cap). With the next step idle blocks above it leave, then those of the youngest."""
        self._cache.set_limit(nbytes)

    def set_own_limit(self, nbytes: int | None) -> None:
        """As set_limit, where several models share the limit: of this model's KV alone."""
        self._cache.set_own_limit(nbytes)

    def trim(self, nbytes: int | None = None) -> int:
        """Let up to `nbytes` (None: all) that no request uses leave with the next step; returns how many will. Weights
        that are only set aside leave, too, if the cache has not as much."""
        given = self._cache.forget_bytes(self._cache.bands()["mapped"] if nbytes is None else nbytes)
        return given if nbytes is not None and given >= nbytes else given + self._slumber.give_up_parked()

    @property
    def model_state(self) -> str:
        """awake, falling asleep, light, deep or parked."""
        return self._slumber.state

    @property
    def is_falling_asleep(self) -> bool:
        """Open requests are all that keeps it awake."""
        return self._slumber.falling is not None

    def sleep(self, bed: Bed, mode: Mode = "refuse") -> None:
        """Give the weights' pages back, now or, with mode wait, once the open requests have ended; mode abort ends them
        first. RequestError if it cannot be; the model is what it was then."""
        self._slumber.check_sleep(bed, num_requests=len(self._sequences), mode=mode)
        if mode == "abort":
            self.end_requests(RequestError("the model was put to sleep", status=503, code="model_sleeping"))
        self._slumber.falling = bed
        if not self._sequences:
            self.fall_asleep()

    def _rest_if_tired(self) -> None:
        """Go to sleep if nobody has asked anything for long enough."""
        now = self._clock()
        if self._slumber.seconds_until_tired(now, is_busy=self.has_work) != 0.0:
            return
        try:
            self.sleep(LIGHT)
        except RequestError as error:
            log.warning("idle, and cannot sleep: %s", error.message)
            self._slumber.stay_up(now)

    def fall_asleep(self) -> None:
        """Go through with a sleep that waited for requests, if none is left. RequestError as sleep()."""
        if self._slumber.falling is not None and not self._sequences:
            self.doze(self._slumber.falling)

    def wake(self) -> None:
        """Bring the weights back. RequestError if it cannot be; the model sleeps on then."""
        self.check_wake()
        self.bring_back()

    def check_wake(self) -> None:
        """RequestError 409 if it is awake, about to sleep or being woken."""
        self._slumber.check_wake()

    def bring_back(self) -> None:
        """wake(), of a model that is asleep, though `is_waking`. What only has to be mapped changes nothing that could
        be looked at."""
        takes = self._slumber.takes_memory
        try:
            self._slumber.wake(self._clock)
        except RequestError:
            if not self._slumber.missing or not self._group.relieve():
                raise
            self.look()
            self._slumber.wake(self._clock)
        if takes:
            self.look()

    @property
    def can_run(self) -> bool:
        """A request is open, and the weights are there."""
        return self.has_work and not self._slumber.is_asleep

    @property
    def is_waking(self) -> bool:
        """Somebody wakes it, between steps: it is asleep until that has ended."""
        return self._slumber.is_waking

    @is_waking.setter
    def is_waking(self, is_waking: bool) -> None:
        self._slumber.is_waking = is_waking

    @property
    def wants_to_wake(self) -> bool:
        """Somebody waits for a model that wakes by itself: now and then until there is memory."""
        held = self.is_paused or self.gives_way
        return self.has_work and not held and self._slumber.may_stir(self._clock())

    @property
    def may_wake(self) -> bool:
        """There is memory for its weights."""
        return not self._slumber.shortage()

    def stir(self) -> None:
        """Try to wake for those who wait."""
        try:
            self.bring_back()
        except RequestError as error:
            self._slumber.put_off(error, self._clock())

    def doze(self, bed: Bed = LIGHT) -> None:
        """Sleep, though requests may wait, so that others can have the memory. Nothing may run. RequestError 503 if the
        device keeps a page."""
        assert not self._scheduler.running
        self._slumber.fall_asleep(bed, self.leave_pages)
        if not bed.park:
            self.look()

    def leave_pages(self) -> None:
        """Let pages that no block needs go, at once, and those that blocks are moved off for it; what stays is tried
        again later, as always."""
        if self._change_pages().copies:  # what moves empty leaves with the next delta
            self._change_pages()

    def _change_pages(self) -> PageDelta:
        plan = self._scheduler.plan_pages(self._clock())
        self._scheduler.commit(plan, self._execute(plan))
        return plan.delta

    def pause(self, mode: Mode | Literal["keep"] = "keep") -> None:
        """Run nothing until resume(). What runs is preempted (keep), aborted with all that waits, or runs to its end
        (wait): is_running tells when that is."""
        self.is_paused = True
        if mode == "keep":
            self._scheduler.preempt_all()
        elif mode == "abort":
            self.end_requests(
                RequestError("the request was ended by a pause", status=503, code="paused", retry_after=1)
            )

    def resume(self) -> None:
        """End a pause. What waits goes on with the next step."""
        self.is_paused = False

    @property
    def is_running(self) -> bool:
        """A request has been admitted and goes on."""
        return bool(self._scheduler.running)

    def _closed_by(self) -> str:
        """What keeps newcomers from being admitted; "" if they are."""
        if self._slumber.is_asleep:
            return "the weights"
        if self.is_paused:
            return "a pause"
        return "another model" if self.gives_way else ""

    def exchange(self, loaded: Loaded) -> None:
        """Go on with these weights, of a model of the same form: nothing computed with the old ones is used again,
        what runs is computed anew. The old ones are the caller's to let go. MemoryShortage or DeviceError: nothing has
        changed."""
        self._group.exchange(loaded)
        self._scheduler.preempt_all()
        self._cache.forget_all()
        self._slumber.exchange(loaded.weights)
        self._reporter.weights = loaded.weights
        self.look()

    def read_words_from(self, folder: str) -> None:
        """The weights are those of another folder, and so may the tokenizer be that grammars follow."""
        self._guided.read_words_from(folder)

    def look(self) -> None:
        """See now, not with the next step, what is free: somebody gave memory back."""
        self._slumber.see()
        self._cache.observe(self._group.observe())

    def relieve(self) -> int:
        """Somebody needs pages: bytes that an allocator only cached, and that are the device's again."""
        return self._group.relieve()

    def report_neighbours(self, counters: PeerCounters) -> None:
        """Show these counters with the memory."""
        self._reporter.peers = counters

    @property
    def gives_back(self) -> bool:
        """Pages that leave go back to the device, where others can have them."""
        return self._cache.limits.elastic

    def try_again(self) -> None:
        """Others gave memory up: what waits for a wake-up need not wait longer to try it."""
        self._slumber.stir()

    def lend(self, nbytes: int) -> int:
        """Let up to `nbytes` of what only idle prefixes and spares hold go to another model of the pool, now; returns
        how many went."""
        before = self._cache.kv_bytes
        if self._cache.forget_bytes(nbytes):
            self.leave_pages()
        return before - self._cache.kv_bytes

    def give_up_parked(self) -> int:
        """Let weights that are only set aside go; returns their bytes."""
        given = self._slumber.give_up_parked()
        if given:
            self.look()
        return given

    def start_counting(self) -> None:
        """The engine is ready: forget what the start-up cached and counted."""
        self._cache.forget_all()
        self._reporter.start_counting(self._scheduler)

    def snapshot(self) -> Snapshot:
        """The state as of now."""
        return self._reporter.snapshot(self._scheduler, self._slumber.state, is_paused=self.is_paused)

    @property
    def num_open(self) -> int:
        """Requests that are running or waiting."""
        return len(self._sequences)

    @property
    def has_work(self) -> bool:
        """A request is running or waiting."""
        return bool(self._sequences)

    def check(self) -> None:
        """Assert every invariant of the cache; for tests."""
        self._cache.check()

    def close(self, *, at_once: bool = False) -> bool:
        """End the ranks; False if a page or a view leaked. `at_once`: a grammar that takes long is not waited for."""
        self._guided.close(at_once=at_once)
        return self._group.close()

    # --- one request

    def _check_state(self, request_id: str) -> None:
        if asleep := self._slumber.refusal():
            raise asleep
        if request_id in self._sequences:
            raise RequestError(f"request id {request_id!r} is already in use", status=409, code="duplicate_id")

    def _seed(self, request: Request) -> int:
        if request.sampling.seed is not None:
            return request.sampling.seed
        high, low, _, _ = philox(self._limits.random_seed, self._arrivals)
        return high << 32 | low

    # --- after a step

    def _forget_finished(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.finish is not None:
                del self._sequences[output.request_id]
                self._guided.forget(output.request_id)

    def _is_watching(self) -> bool:
        """Without rows or page changes a step may still help: a request waits for memory, which may have come, or
        an elastic rank keeps handles that the device did not take back."""
        surplus = self._cache.limits.elastic and any(seen.free_handles for seen in self._cache.observations)
        waits = bool(self._scheduler.running or self._scheduler.waiting) and not self.is_paused
        return waits or surplus

    def _expire(self) -> list[Output]:
        """503 for the head of the queue once nothing has run during memory_wait_seconds of its own waiting.

        One a step: the next may need less. If it does not fit either, it has waited as long and need not start anew.
        """
        scheduler = self._scheduler
        if scheduler.running or not scheduler.waiting or self.is_paused or self.gives_way or self.is_waking:
            self._starved_since = None
            return []
        now, head = self._clock(), scheduler.waiting[0]
        if self._starved_since is None:
            self._starved_since = now
        since = max(self._starved_since, head.queued_at)
        if head.stuck_since is not None:  # it runs up to the same token, again and again
            since = min(since, head.stuck_since)
        if now - since < self._limits.memory_wait_seconds:
            return []
        self.abort(head.request.request_id)
        error = self._slumber.put_off_by or self._admission.shortage(head, self._scheduler.pace.shortage)
        return [refusal(head.request.request_id, error)]
