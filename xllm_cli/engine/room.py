"""Memory that changes hands between the models of one pool.

What a model lacks comes from the others, in this order, as far as it is needed:

    1  spares and idle prefixes, the least recently used block of all models first
    2  weights that are only set aside
    3  with --auto_sleep, models without a request, the longest unused first: they sleep

If that is not enough and somebody has waited for CLAIM_SECONDS, whoever waits longest claims: models that have been
awake for AWAKE_SECONDS admit nobody until they have run dry, sleep then (with --auto_sleep and --auto_wake, though
requests wait), and come back by a claim of their own. Nobody is held back for what running dry could not bring. Names
that share weights sleep together, or none does. Knows no request and no page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from xllm_cli.engine.hosted import HostedModel
from xllm_cli.errors import RequestError

log = logging.getLogger("xllm.engine")

CLAIM_SECONDS = 0.25  # shorter than anybody minds, longer than most steps
AWAKE_SECONDS = 1.0  # what a model that was woken may count on: waking costs a tenth of it
REFUSED_SECONDS = 1.0  # until a model that could not be put to sleep is tried again
LOAN_PAGES = 8  # taken from one model before the others' are compared again


class Room:
    """settle() after a round of steps; make() for what is about to be needed."""

    def __init__(self, *, auto_sleep: bool, auto_wake: bool, clock: Callable[[], float]) -> None:
        self._auto_sleep = auto_sleep
        self._takes_turns = auto_sleep and auto_wake
        self._clock = clock

    def settle(self, stepped: Sequence[HostedModel], models: Sequence[HostedModel]) -> list[HostedModel]:
        """See to everybody who lacked memory in the round that ends; `stepped` are those who tried. Returns those who
        may find some now."""
        lacking = {model: model.engine.needs.of_pool for model in models}
        helped = []
        for model in stepped:
            if lacking[model] > 0 and (got := self.make(model, lacking[model], models)):
                lacking[model] -= got
                model.engine.try_again()
                helped.append(model)
        return helped + self._claim({model: nbytes for model, nbytes in lacking.items() if nbytes > 0}, models)

    def make(self, model: HostedModel | None, nbytes: int, models: Iterable[HostedModel]) -> int:
        """Take up to `nbytes`, a little more in whole pages, from the others of `models`; returns how many came."""
        others = [other for other in models if other is not model]
        got = self.spare(nbytes, others)
        for names in sorted(_sharing(models), key=_last_used) if self._auto_sleep else ():
            if got < nbytes and model not in names and not any(name.engine.has_work for name in names):
                got += self._put_to_sleep(names, model)
        return got

    def spare(self, nbytes: int, models: Sequence[HostedModel]) -> int:
        """Take up to `nbytes` of what serves no request and no awake model: nobody sleeps for it."""
        got = _borrow(models, nbytes)
        for model in models:
            if got < nbytes:
                got += model.engine.give_up_parked()
        return got

    def _put_to_sleep(self, names: Sequence[HostedModel], model: HostedModel | None) -> int:
        """What that brings, of names that are all that share their weights; nothing soon after it was refused."""
        now = self._clock()
        if any(now < name.refused_until for name in names):
            return 0
        came = _doze(names, model)
        for name in names:
            if name.engine.model_state == "awake":
                name.refused_until = now + REFUSED_SECONDS
        return came

    # --- claims

    def _claim(self, lacking: dict[HostedModel, int], models: Sequence[HostedModel]) -> list[HostedModel]:
        """Let who has waited longest go ahead of everybody's newcomers. That one, if others sleep for it now."""
        now = self._clock()
        waiting = [(model.engine.needs.waits_since, model) for model in lacking]
        due = [(since, model) for since, model in waiting if since is not None and now - since >= CLAIM_SECONDS]
        claimant = min(due, key=lambda pair: pair[0])[1] if due else None
        for model in models:
            model.engine.gives_way = False
        got = 0 if claimant is None else self._hold_others(claimant, lacking[claimant], models)
        for model in models:
            if model.engine.needs.is_tight_to_wake:
                _hold(other for other in models if other is not model and other.cache.page_bytes > 1)
        if claimant is None or not got:
            return []
        claimant.engine.try_again()  # before those who sleep now do
        return [claimant]

    def _hold_others(self, claimant: HostedModel, wanted: int, models: Sequence[HostedModel]) -> int:
        """Bytes that came of it already."""
        now, got = self._clock(), 0
        groups = [_Group(names, claimant, takes_turns=self._takes_turns) for names in _sharing(models)]
        if sum(group.most for group in groups) < wanted:
            return 0  # nobody waits for what does not come
        for group in sorted(groups, key=lambda group: group.awake_since):
            if wanted > 0 and group.most and now - group.awake_since >= AWAKE_SECONDS:
                wanted -= group.most
                _hold(group.others)
                if group.may_sleep and not any(other.engine.is_running for other in group.others):
                    got += self._put_to_sleep(group.others, claimant)
        return got


class _Group:
    """Those who share weights, as a claimant sees them: `others` are they without itself."""

    def __init__(self, names: Sequence[HostedModel], claimant: HostedModel, *, takes_turns: bool) -> None:
        self.others = [name for name in names if name is not claimant]
        self.may_sleep = takes_turns and len(self.others) == len(names) and _are_awake(names)
        self.awake_since = max((other.awake_since for other in self.others), default=0.0)

    @property
    def most(self) -> int:
        """Bytes that come once they have run dry."""
        return _held(self.others) if self.may_sleep else sum(other.kv_in_pool for other in self.others)


def _sharing(models: Iterable[HostedModel]) -> list[list[HostedModel]]:
    """The names that hold weights in pages; those that share them together."""
    found: dict[int, list[HostedModel]] = {}
    for model in models:
        if model.loaded is not None and model.loaded.weights.state == "awake":
            found.setdefault(model.weights_id, []).append(model)
    return list(found.values())


def _last_used(names: Sequence[HostedModel]) -> float:
    return max(name.last_used for name in names)


def _are_awake(names: Sequence[HostedModel]) -> bool:
    """None is falling asleep already."""
    return all(name.engine.model_state == "awake" for name in names)


def _held(names: Sequence[HostedModel]) -> int:
    """Bytes of pages of names that share weights."""
    return sum(name.kv_in_pool for name in names) + (names[0].weight_bytes if names else 0)


def _hold(models: Iterable[HostedModel]) -> None:
    """They admit nobody and do not wake, until this is looked at again."""
    for model in models:
        model.engine.gives_way = True


def _doze(names: Sequence[HostedModel], model: HostedModel | None) -> int:
    """What that brings, of names that are all that share their weights."""
    before = _held(names)
    if not _are_awake(names) or not before:
        return 0
    for name in names:
        try:
            name.engine.doze()
        except RequestError as error:
            log.warning("%s cannot make room: %s", name.name, error.message)
        else:
            log.info("%s sleeps to make room%s", name.name, f" for {model.name}" if model else "")
    return before - _held(names)


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
