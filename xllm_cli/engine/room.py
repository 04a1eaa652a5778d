"""Memory that changes hands between the models of one pool.

What a model lacks comes from the others, in this order, as far as it is needed:

    1  spares and idle prefixes, the least recently used block of all models first
    2  weights that are only set aside
    3  with --auto_sleep, models without a request, the longest unused first: they sleep

If that is not enough and somebody has waited for CLAIM_SECONDS, whoever waits longest claims: models that have been
awake for AWAKE_SECONDS admit nobody until they have run dry, sleep then (with --auto_sleep and --auto_wake, though
requests wait), and come back by a claim of their own. Knows no request and no page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from xllm_cli.engine.hosted import HostedModel
from xllm_cli.errors import RequestError

log = logging.getLogger("xllm.engine")

CLAIM_SECONDS = 0.25  # shorter than anybody minds, longer than most steps
AWAKE_SECONDS = 1.0  # what a model that was woken may count on: waking costs a tenth of it
LOAN_PAGES = 8  # taken from one model before the others' are compared again


class Room:
    """settle() after a round of steps; make() for what is about to be needed."""

    def __init__(self, *, auto_sleep: bool, auto_wake: bool, clock: Callable[[], float]) -> None:
        self._auto_sleep = auto_sleep
        self._auto_wake = auto_wake
        self._clock = clock

    def settle(self, stepped: Sequence[HostedModel], models: Sequence[HostedModel]) -> list[HostedModel]:
        """See to everybody who lacked memory in the round that ends; `stepped` are those who tried. Returns those who
        may find some now."""
        helped = []
        for model in stepped:
            nbytes = model.engine.needs.of_pool
            if nbytes and self.make(model, nbytes, models):
                model.engine.try_again()
                helped.append(model)
        self._claim([model for model in models if model.engine.needs.of_pool and model not in helped], models)
        return helped

    def make(self, model: HostedModel | None, nbytes: int, models: Iterable[HostedModel]) -> int:
        """Take up to `nbytes`, a little more in whole pages, from the others of `models`; returns how many came."""
        others = [other for other in models if other is not model]
        got = self.spare(nbytes, others)
        if self._auto_sleep:
            for other in sorted(others, key=lambda other: other.last_used):
                if got < nbytes and not other.engine.has_work:
                    got += self._put_to_sleep(other, model)
        return got

    def spare(self, nbytes: int, models: Sequence[HostedModel]) -> int:
        """Take up to `nbytes` of what serves no request and no awake model: nobody sleeps for it."""
        got = _borrow(models, nbytes)
        for model in models:
            if got < nbytes:
                got += model.engine.give_up_parked()
        return got

    def _put_to_sleep(self, other: HostedModel, model: HostedModel | None) -> int:
        """What that brings; nothing is done if it brings nothing: somebody else needs the same weights."""
        held = other.held_bytes
        if other.engine.model_state != "awake" or not held or other.shares_awake_weights():
            return 0
        try:
            other.engine.doze()
        except RequestError as error:
            log.warning("%s cannot make room: %s", other.name, error.message)
            return 0
        log.info("%s sleeps to make room%s", other.name, f" for {model.name}" if model else "")
        return held - other.held_bytes

    # --- claims

    def _claim(self, lacking: Sequence[HostedModel], models: Sequence[HostedModel]) -> None:
        """Let the one who has waited longest go ahead of everybody's newcomers."""
        now = self._clock()
        waiting = [(model.engine.needs.waits_since, model) for model in lacking]
        due = [(since, model) for since, model in waiting if since is not None and now - since >= CLAIM_SECONDS]
        claimant = min(due, key=lambda pair: pair[0])[1] if due else None
        for model in models:
            model.engine.gives_way = False
        if claimant is not None:
            self._hold_others(claimant, models, now)

    def _hold_others(self, claimant: HostedModel, models: Sequence[HostedModel], now: float) -> None:
        wanted = claimant.engine.needs.of_pool
        others = [m for m in models if m is not claimant and m.held_bytes and now - m.awake_since >= AWAKE_SECONDS]
        for other in sorted(others, key=lambda other: other.awake_since):
            if wanted <= 0:
                return
            wanted -= other.held_bytes
            other.engine.gives_way = True
            if self._auto_sleep and self._auto_wake and not other.engine.is_running:
                self._put_to_sleep(other, claimant)


def _borrow(others: Sequence[HostedModel], nbytes: int) -> int:
    """Bytes of idle blocks, everybody's oldest first."""
    got = 0
    lenders = list(others)
    while lenders and got < nbytes:
        lender = min(lenders, key=lambda other: (other.cache.oldest_idle is not None, other.cache.oldest_idle or 0))
        lent = lender.engine.lend(min(nbytes - got, LOAN_PAGES * lender.cache.page_bytes))
        got += lent
        if not lent:
            lenders.remove(lender)
    return got
