"""Requests over a driver that fails all the time: scheduler, cache manager, store and pool as in a server, no model.

    python tests/fault_campaign.py FAULTS [SEED]      prints one line for every 100 000 faults, and what was left behind

Every block's first and last bytes hold a stamp of the tokens up to its end, written and read through the mapped pages,
so that a row over a lost or a foreign page is noticed. A fault counts when the driver has reported it, not when it was
planned.

Stuck or unlucky? After a failed map a plan grows for one sequence only: a chunk of 4 blocks, at most 10 pages here. A
try of n pages succeeds if no armed fault is nearer, which is so in (0 + max(0, 8 - n)/8 + max(0, 40 - n)/40) / 3 of all
cases, for create and again for map: 0.06 for 10 pages. There is a try at least every 2 s, so that a request which is
only unlucky is taken for stuck with 0.94^300 = 9e-9. Of four sequences' 20 pages together 0.028 of the tries succeed:
a batch like that, tried whole again and again, passed for stuck with 1e-5 or more, thousands of times in a campaign.
"""

from __future__ import annotations

import random
import sys
import time
import zlib
from collections import Counter

from cache_ops import Clock, make_cache, spec_of
from driver_kinds import open_kind, peek, poke

from xllm_cli.core import Observation, Request, Row, SamplingParams, StepPlan, StepResult, TokenLogprob
from xllm_cli.engine.scheduler import Scheduler, StepLimits
from xllm_cli.engine.sequence import Sequence
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.driver import FaultyDriver
from xllm_cli.vmm.pool import PagePool
from xllm_cli.worker.kv_store import VirtualKvStore

PAGE_BYTES = 4096
DEVICE_PAGES = 40
VERBS = ("create", "map", "unmap", "destroy")
LAYOUTS = ((3000,), (4096, 1024), (2100, 2100, 700), (5000,))
BLOCK_SIZE = 4
MOST_ALIVE = 6
SWEEP_FAULTS = 5_000
"""After so many faults everything ends and nothing may be left."""
LONGEST_STEP_SECONDS = 1.0
PATIENCE_SECONDS = 600.0
"""Simulated: a request that takes longer is stuck. One that is never short takes about a second."""


class Storm:
    """Always one fault ahead of every verb. For create and map it is at most `gap` pages away: a batch of as many pages
    cannot succeed. Unmap and destroy fail at every second page."""

    def __init__(self, driver: FaultyDriver, rng: random.Random) -> None:
        self.faults: Counter[str] = Counter()
        self.gap = 0
        self._driver, self._rng = driver, rng
        self._planned: dict[str, int] = {}

    def move(self) -> None:
        """Count the faults that happened, and plan the next of each verb."""
        counts = self._driver.counts()
        for verb in VERBS:
            pages = counts[f"{verb}_pages"]
            if self._planned.get(verb, 0) > pages:
                continue
            self.faults[verb] += verb in self._planned
            self._planned.pop(verb, None)
            if self.gap:
                grows = verb in ("create", "map")
                self._planned[verb] = pages + self._rng.randint(1, self.gap if grows else 2)
                is_shortage = grows and self._rng.random() < 0.5
                self._driver.fail(verb, self._planned[verb], is_shortage)

    @property
    def total(self) -> int:
        return self.faults.total()


class Campaign:
    """One server's memory under fire. `leaked` and `stuck` stay 0."""

    def __init__(self, seed: int) -> None:
        self.rng, self.clock = random.Random(seed), Clock()
        self.driver = FaultyDriver(open_kind("small", pages=DEVICE_PAGES, poison=0xFF))
        self.storm = Storm(self.driver, self.rng)
        widths = self.rng.choice(LAYOUTS)
        self.cache = make_cache(
            spec_of(*widths, block_size=BLOCK_SIZE),
            pages=DEVICE_PAGES,
            page_bytes=PAGE_BYTES,
            spare_pages=self.rng.choice((0, 0, 2)),
            limits={"reserve": 2 * PAGE_BYTES},
            options={"clock": self.clock},
        )
        self.pool = PagePool(self.driver, page_bytes=PAGE_BYTES)
        self.arenas = [Arena(self.driver, self.pool, self.cache.num_blocks * width) for width in widths]
        self.store = VirtualKvStore(self.arenas, self.pool, PAGE_BYTES, fence=lambda: None, block_bytes=widths)
        self.cache.observe(self.observe())
        self.scheduler = Scheduler(self.cache, StepLimits(tokens=64, sequences=4, chunk=16, prefill=None))
        self.alive: dict[int, Sequence] = {}
        self.since: dict[int, float] = {}
        self.leaked = self.stuck = self.steps = self.served = self.true_shortages = 0
        self.longest_wait = 0.0

    def run(self, faults: int) -> None:
        """Serve until so many faults have happened, sweeping now and then."""
        swept = 0
        while self.storm.total < faults:
            self.storm.gap = self.rng.choice((2, 8, 40))
            self.arrive()
            if self.rng.random() < 0.8:
                self.cache.forget_bytes(1 << 30)  # a neighbour is short: every page that only idle blocks keep leaves
            self.step()
            if self.storm.total - swept >= SWEEP_FAULTS:
                swept = self.storm.total
                self.sweep()
        self.sweep()

    # --- a server's work

    def arrive(self) -> None:
        if len(self.alive) >= MOST_ALIVE:
            return
        prompt = [self.rng.randrange(3) for _ in range(self.rng.choice((1, 4, 9, 17)))]
        if self.alive and self.rng.random() < 0.5:
            prompt = self.rng.choice(list(self.alive.values())).tokens[:17]
        most = self.rng.choice((1, 1, 2, 9))
        number = self.served + len(self.alive) + 1
        wanted = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        request = Request(request_id=str(number), prompt_ids=prompt, sampling=wanted)
        self.alive[number] = sequence = Sequence(number, request, self.cache.open(), most, 0)
        self.since[number] = self.clock.now
        self.scheduler.add(sequence)

    def step(self) -> None:
        """As Engine.step does: a plan whose pages cannot be had is made once more."""
        self.steps += 1
        for _ in range(2):
            plan = self.scheduler.plan(self.clock.now)
            result = self.execute(plan)
            self.storm.move()
            if result.mapped:
                for output in self.scheduler.commit(plan, result):
                    if output.finish is not None:
                        self.end(int(output.request_id))
                break
            self.scheduler.rollback(plan, result)
        self.clock.now += self.rng.choice((0.02, 0.2, LONGEST_STEP_SECONDS))
        late = [number for number, since in self.since.items() if self.clock.now - since > PATIENCE_SECONDS]
        self.stuck += len(late)
        assert not late, f"requests {late} are stuck; {self.cache.headroom()}, last: {self.pool.last_shortage}"

    def end(self, number: int) -> None:
        self.longest_wait = max(self.longest_wait, self.clock.now - self.since.pop(number))
        del self.alive[number]
        self.served += 1

    def execute(self, plan: StepPlan) -> StepResult:
        """As Worker.execute does, with a model that only looks at its context."""
        outcome = self.store.apply(plan.delta, plan.keep_free)
        if (
            "host memory" in outcome.shortage
        ):  # no planned one: this machine is short, and our clock runs far ahead of it
            time.sleep(LONGEST_STEP_SECONDS)
            self.true_shortages += 1
        drawn = tuple(token for row in plan.rows if (token := self.run_row(row))) if outcome.mapped else ()
        if outcome.mapped:
            self.store.trim()
        return StepResult(
            step=plan.step,
            mapped=outcome.mapped,
            observation=self.observe(),
            tokens=drawn,
            stuck=outcome.stuck,
        )

    def run_row(self, row: Row) -> TokenLogprob | None:
        tokens = self.alive[row.sequence].tokens
        end, crc = row.start + len(row.token_ids), 0
        first = row.start // BLOCK_SIZE
        for index, block in enumerate(row.blocks[: -(-end // BLOCK_SIZE)]):
            crc = zlib.crc32(bytes(tokens[index * BLOCK_SIZE : min(end, (index + 1) * BLOCK_SIZE)]), crc)
            stamp = crc.to_bytes(4, "little")
            for arena, tensor in zip(self.arenas, self.cache.spec.tensors, strict=True):
                head = arena.address + block * tensor.bytes_per_block
                tail = head + tensor.bytes_per_block - 4
                if index >= first:
                    poke(head, stamp)
                    poke(tail, stamp)
                else:
                    same = peek(head, 4) == peek(tail, 4) == stamp
                    assert same, f"sequence {row.sequence}: block {block} holds something else"
        return TokenLogprob((tokens[-1] + end) % 3, 0.0) if row.sampling is not None else None

    def observe(self) -> Observation:
        owned, free = self.store.owned_bytes, self.store.free_handle_bytes
        total = DEVICE_PAGES * PAGE_BYTES
        return Observation(total=total, free=total - owned, owned=owned, free_handles=free)

    # --- the end

    def sweep(self) -> None:
        """Serve what is left without new faults; then nothing may be mapped, owned or backed by memory."""
        self.storm.gap = 0
        deadline = self.clock.now + PATIENCE_SECONDS
        while self.alive and self.clock.now < deadline:
            self.step()
        self.cache.check()
        self.cache.forget_all()
        for _ in range(12):  # each verb has one planned fault left at most, and a stuck page is retried once a second
            self.clock.now += 1.1
            self.step()
        self.cache.check()
        self.pool.check()
        usage = self.driver.usage()
        self.leaked += self.driver.memfd_bytes() + (usage["handles"] + usage["mapped"]) * PAGE_BYTES
        assert not self.leaked, f"left behind: {usage}, {self.cache.bands()}"

    def close(self) -> None:
        """The driver's ranges go too."""
        closed = any(self.store.close() for _ in range(5))
        assert closed and not self.driver.usage()["ranges"]


def main(faults: int, seed: int) -> None:
    """Campaigns of 100 000 faults, one after another."""
    begin, done = time.monotonic(), Counter[str]()
    while done.total() < faults:
        campaign = Campaign(seed)
        campaign.run(min(100_000, faults - done.total()))
        campaign.close()
        done += campaign.storm.faults
        print(
            f"{done.total()} faults in {time.monotonic() - begin:.0f} s, seed {seed}: {dict(done)}, "
            f"{campaign.served} requests in {campaign.steps} steps, {campaign.cache.counters.map_failures} lost votes, "
            f"{campaign.leaked} bytes leaked, {campaign.stuck} stuck, longest wait {campaign.longest_wait:.0f} s, "
            f"{campaign.true_shortages} true shortages",
            flush=True,
        )
        seed += 1


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 32))
