"""Which sequences run in the next step: plan, then commit or rollback.

Owns the waiting and the running sequences. Memory is asked of the cache manager, which answers yes or no; pages,
devices and tensors are unknown here. Order of a plan: running decodes (oldest first), running prefills, newcomers.

Who gives way when memory is short (SPEC.md §7): a running decode preempts the youngest by arrival, perhaps itself; a
prefill waits while anything else runs; a waiting sequence never preempts. Newcomers are first come, first served:
nobody overtakes the head of the queue, so a big request is not starved by small ones. Where requests have priorities,
these count before arrival in all of this, and the unimportant wait for as long as others come.

Longer than other files: a plan, and all that can become of it, is read in one place.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from itertools import chain

from xllm_cli.cache.manager import CacheManager
from xllm_cli.core import Output, StepPlan, StepResult, TokenLogprob
from xllm_cli.engine.draft import Draft, Entry, Totals
from xllm_cli.engine.draft import StepLimits as StepLimits
from xllm_cli.engine.pace import Pace
from xllm_cli.engine.sequence import Sequence


class Scheduler:
    """Continuous batching over one cache. One plan is open at a time: plan → (commit | break_off | rollback)."""

    def __init__(self, cache: CacheManager, limits: StepLimits) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order, which is by arrival unless requests have priorities
        self.totals = Totals()
        self.waiting_for = ""
        self.closed_by = ""  # why nobody is admitted; "" while newcomers are
        self.pace = Pace(limits.tokens)
        self._cache = cache
        self._limits = limits
        self._draft = Draft(0, 0.0, 0, 0)

    # --- arrivals and departures

    def add(self, sequence: Sequence) -> None:
        """Queue a newcomer."""
        if self._limits.by_priority:
            sequence.rank = sequence.request.priority
        self._queue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence between two steps, wherever it is; its blocks go back at once."""
        if sequence in self.running:  # the short list first: what ended is there, and the queue may hold a million
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._cache.release(sequence.table)

    # --- plan

    def plan(self, now: float) -> StepPlan:
        """The next step. Without rows it may still change pages."""
        limits = self._limits
        tokens = self.pace.tokens
        prefill = tokens if limits.prefill is None else min(tokens, limits.prefill)
        self.totals.steps += 1
        self._draft = draft = Draft(self.totals.steps, now, tokens, prefill, limits.scored)
        self.waiting_for = ""
        self._obey_limit(draft)
        self._schedule_decodes(draft)
        self._schedule_prefills(draft)
        if not draft.entries:
            self._force_oldest(draft)
        self._admit(draft)
        delta = self._cache.plan_delta(now)
        rows = tuple(entry.row for entry in draft.entries)
        short = self.short_bytes if self._cache.headroom().limited_by == "free_memory" else 0
        return StepPlan(step=draft.step, delta=delta, rows=rows, keep_free=self._cache.keep_free(), short=short)

    def plan_pages(self, now: float) -> StepPlan:
        """A step without rows, whoever could run: only what pages are due."""
        self.totals.steps += 1
        self._draft = Draft(self.totals.steps, now, 0, 0)
        delta = self._cache.plan_delta(now)
        return StepPlan(step=self.totals.steps, delta=delta, rows=(), keep_free=self._cache.keep_free())

    def preempt_all(self) -> None:
        """Whatever runs gives its blocks back and waits, ahead of newcomers."""
        while self.running:
            self._preempt(self.running[-1], self._draft)

    @property
    def short_bytes(self) -> int:
        """KV bytes of the blocks that a sequence wanted in the last plan and could not have; 0 if nobody was short."""
        return self._draft.short_blocks * self._cache.spec.bytes_per_block

    def blocks_ahead(self) -> int:
        """The most blocks that the next plan takes: of prompts a step's worth, and fewer where prefixes are cached."""
        cache, limits = self._cache, self._limits
        tokens = self.pace.tokens if limits.prefill is None else min(self.pace.tokens, limits.prefill)
        blocks = sum(cache.blocks_for(s.computed + 1) - len(s.table.blocks) for s in self.running if s.is_decoding)
        for sequence in chain((s for s in self.running if not s.is_decoding), self.waiting):
            if tokens < 1:
                break
            count = min(tokens, len(sequence.tokens) - sequence.computed)
            tokens -= count
            blocks += cache.blocks_for(sequence.computed + count + 1) - len(sequence.table.blocks)
        return blocks

    def _obey_limit(self, draft: Draft) -> None:
        """A limit lowered below what running sequences hold: the youngest give way."""
        while self.running and self._cache.over_limit_bytes() > 0:
            self._preempt(self.running[-1], draft)

    def _schedule_decodes(self, draft: Draft) -> None:
        for sequence in [s for s in self.running if s.is_decoding and s.is_ready]:
            if draft.tokens_left < 1:
                return
            if sequence.preempted_in_step == draft.step:
                continue
            if self._make_room(sequence, 1, draft):
                self._add(sequence, 1, draft)

    def _make_room(self, sequence: Sequence, count: int, draft: Draft) -> bool:
        """Blocks for a running decode, if need be those of the youngest. While growth is closed it waits instead."""
        while not self._cache.grow(sequence.table, sequence.computed + count):
            draft.miss(1)
            if self._cache.growth_is_closed:
                return False
            victim = self.running[-1]  # younger than every sequence already in the draft, or `sequence` itself
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        return True

    def _schedule_prefills(self, draft: Draft) -> None:
        for sequence in [s for s in self.running if not s.is_decoding and s.is_ready]:
            if draft.is_short or not self._prefill(sequence, draft):
                return

    def _prefill(self, sequence: Sequence, draft: Draft) -> bool:
        """Schedule a running prefill's next chunk; False if it must wait and so must everybody behind it."""
        before = sequence.computed
        self._match(sequence)
        count = self._chunk(sequence, draft)
        if count < 1 or not self._cache.grow(sequence.table, sequence.computed + count):
            if count > 0:
                draft.miss(self._blocks_missing(sequence))
            self._cache.shrink(sequence.table, self._cache.blocks_for(before))
            sequence.computed = before
            return False
        self._add(sequence, count, draft, computed_before=before)
        return True

    def _force_oldest(self, draft: Draft) -> None:
        """Nothing could run: the youngest give way, one after another, until the oldest runs or is alone. Not while a
        grammar thinks: then it may be that nothing is short. Nor while a failed map keeps growth closed for a moment:
        what is computed is dearer than the wait."""
        if self._cache.growth_opens_soon:
            return
        while self.running and all(sequence.is_ready for sequence in self.running):
            oldest = self.running[0]
            count = 1 if oldest.is_decoding else self._chunk(oldest, draft)
            if self._cache.grow(oldest.table, oldest.computed + count):
                self._add(oldest, count, draft)
                return
            self._preempt(self.running[-1], draft)

    def _admit(self, draft: Draft) -> None:
        if self.waiting and self.closed_by:
            self.waiting_for = self.closed_by
            return
        promised = None  # blocks that running prefills are still to get; counted once, a burst may admit hundreds
        while self.waiting and len(self.running) < self._limits.sequences:
            sequence = self.waiting[0]
            if draft.is_short or sequence.preempted_in_step == draft.step:
                draft.miss(self._blocks_missing(sequence))
                self.waiting_for = "memory"
                return
            if self.pace.is_resting(draft.now):
                self.waiting_for = "execution memory"
                return
            if not sequence.is_ready:
                self.waiting_for = "a step"
                return
            if promised is None:
                promised = sum(self._promised(s) for s in self.running)
            if not self._admit_head(sequence, draft, promised):
                self._cache.release(sequence.table)
                sequence.computed = 0
                return
            self.waiting.popleft()
            insort(self.running, sequence, key=lambda s: s.order)
            sequence.admitted()
            promised += self._promised(sequence)
        if self.waiting:
            self.waiting_for = "a slot"

    def _admit_head(self, sequence: Sequence, draft: Draft, promised: int) -> bool:
        """Admission needs the whole remaining prompt and one block more to fit, besides what was promised before."""
        self._match(sequence)
        count = self._chunk(sequence, draft)
        if count < 1:
            self.waiting_for = "a step"
            return False
        missing = promised + self._blocks_missing(sequence)
        fits = self._cache.fits(missing, sequence.table)
        if not fits or not self._cache.grow(sequence.table, sequence.computed + count):
            draft.miss(missing)
            self.waiting_for = "memory"
            return False
        self._add(sequence, count, draft, computed_before=0, admitted=True)
        return True

    def _match(self, sequence: Sequence) -> None:
        """Take over what is cached of the part not yet computed; possible only at a block boundary. What is cached has
        no log probabilities, so a prompt that wants them is computed."""
        if sequence.num_unscored == 0 and sequence.computed % self._cache.block_size == 0:
            sequence.computed = max(sequence.computed, self._cache.match(sequence.table, sequence.tokens))

    def _chunk(self, sequence: Sequence, draft: Draft) -> int:
        """How many tokens of a prefill may run now. Without chunking a prompt runs whole; only what is recomputed after
        a preemption can be longer than a whole step, and is cut then."""
        missing = len(sequence.tokens) - sequence.computed
        room = min(draft.tokens_left, draft.prefill_left)
        if sequence.num_unscored:  # a cut is allowed even without chunking
            return min(missing, room, draft.scored_left, self._limits.chunk or missing)
        if self._limits.chunk is not None:
            return min(missing, room, self._limits.chunk)
        return min(missing, room) if missing <= room or not draft.entries else 0

    def _promised(self, sequence: Sequence) -> int:
        return 0 if sequence.is_decoding else self._blocks_missing(sequence)

    def _blocks_missing(self, sequence: Sequence) -> int:
        """Blocks to finish a prefill and one more to decode into, but no more than its last token will ever need."""
        cache = self._cache
        wanted = min(cache.blocks_for(len(sequence.tokens)) + 1, cache.blocks_for(sequence.most_positions))
        return wanted - len(sequence.table.blocks)

    def _add(
        self,
        sequence: Sequence,
        count: int,
        draft: Draft,
        *,
        computed_before: int | None = None,
        admitted: bool = False,
    ) -> None:
        before = sequence.computed if computed_before is None else computed_before
        draft.entries.append(Entry(sequence, sequence.row(count), before, admitted))
        draft.tokens_left -= count
        if not sequence.is_decoding:
            draft.prefill_left -= count
            draft.scored_left -= count if sequence.num_unscored else 0
            if self._limits.share_in_batch:
                self._cache.publish(sequence.table, sequence.tokens, sequence.computed + count, provisional=True)

    def _preempt(self, victim: Sequence, draft: Draft) -> None:
        """Give a running sequence's blocks back; it waits ahead of newcomers and recomputes what is not cached."""
        self.running.remove(victim)
        self._cache.release(victim.table)
        victim.computed = 0
        victim.preempted_in_step = draft.step
        self._queue(victim)
        self.totals.preemptions += 1

    def _queue(self, sequence: Sequence) -> None:
        """Put a sequence where its order says: what ran is older than the newcomers of its rank, who come last."""
        place = len(self.waiting)
        if self.waiting and self.waiting[-1].order > sequence.order:
            place = next(i for i, other in enumerate(self.waiting) if other.order > sequence.order)
        self.waiting.insert(place, sequence)

    # --- outcomes

    def rollback(self, plan: StepPlan, result: StepResult) -> None:
        """The plan's pages could not be had: no row ran. Blocks and cursors go back; unmaps and evictions stand."""
        self._take_back()
        self._cache.refuse(plan.delta, result.stuck)
        self._cache.observe(result.observation)

    def break_off(self, plan: StepPlan, result: StepResult) -> None:
        """The pages are there, but the rows ran out of memory to compute in: no token. What they wrote is written again
        by a smaller step, and the youngest gives its memory up: to the others, or to its own next try."""
        self._cache.acknowledge(plan.delta, result.stuck)
        num_tokens = sum(len(row.token_ids) for row in plan.rows)
        if num_tokens <= 1:
            self._draft.entries[0].sequence.stuck(plan.rows[0].start, self._draft.now)
        self._take_back()
        self.pace.failed(num_tokens, result.exhausted, self._draft.now)
        self.totals.exhausted_steps += 1
        if len(self.running) > 1 or (self.running and num_tokens <= 1):
            self._preempt(self.running[-1], self._draft)
        self._cache.observe(result.observation)

    def _take_back(self) -> None:
        """Blocks and cursors of the open plan as they were before it."""
        self._cache.withdraw()
        for entry in reversed(self._draft.entries):
            sequence = entry.sequence
            if entry.admitted:
                self.running.remove(sequence)
                self._cache.release(sequence.table)
                self._queue(sequence)
            else:  # a table always covers exactly what is computed, so the cursor tells the blocks
                self._cache.shrink(sequence.table, self._cache.blocks_for(entry.computed_before))
            sequence.computed = entry.computed_before
        self._draft.entries.clear()

    def commit(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Every row ran: append tokens, publish full blocks, release what finished. One output per token drawn."""
        self._cache.acknowledge(plan.delta, result.stuck)
        self._cache.observe(result.observation)
        if plan.rows:
            self.pace.succeeded()
        drawn, scored = iter(result.tokens), iter(result.scores)
        outputs: list[Output] = []
        for entry in self._draft.entries:
            self._count(entry)
            entry.sequence.ran(len(entry.row.token_ids))
            scores = next(scored) if entry.row.scoring is not None else []
            finish = entry.sequence.score(scores)
            output: Output | None = None
            if entry.row.sampling is not None:
                output = self._take(entry.sequence, next(drawn), scores)
            elif scores or finish is not None:
                output = entry.sequence.output([], finish, scores)
            if output is None or output.error is None:  # else its KV is not for others
                self._cache.publish(entry.sequence.table, entry.sequence.tokens, entry.sequence.computed)
            if output is not None:
                outputs.append(output)
                if output.finish is not None:
                    self.remove(entry.sequence)
        self._draft.entries.clear()
        return outputs

    def _take(self, sequence: Sequence, token: TokenLogprob, scores: list[TokenLogprob]) -> Output:
        if token.token_id < 0:
            return sequence.failure("the model's output for this request is not a number", "model_output_invalid")
        self.totals.generated_tokens += 1
        finish = sequence.append(token.token_id)
        return sequence.output([token], finish, scores)

    def _count(self, entry: Entry) -> None:
        sequence, row = entry.sequence, entry.row
        end, hits = row.start + len(row.token_ids), row.start - entry.computed_before
        self.totals.prompt_tokens += max(0, min(end, sequence.num_prompt) - row.start)
        self.totals.prefill_chunks += not sequence.is_decoding
        self.totals.prefix_queries += len(sequence.tokens) if entry.admitted else 0
        self.totals.prefix_hits += hits
        sequence.hit(hits)

    def sequences(self) -> Iterable[Sequence]:
        """Everything that is not finished."""
        yield from self.running
        yield from self.waiting
