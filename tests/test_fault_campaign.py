"""Many driver failures in a row: nothing exits, nothing leaks, nobody waits for ever. And the campaign can fail."""

from __future__ import annotations

import random

import pytest
from fault_campaign import Campaign

from xllm_cli.cache.account import GrowthGate
from xllm_cli.vmm.pool import PagePool


def survive(faults: int, seed: int) -> Campaign:
    campaign = Campaign(seed)
    campaign.run(faults)
    campaign.close()
    assert (campaign.leaked, campaign.stuck) == (0, 0) and campaign.served > faults // 50
    return campaign


def test_thousands_of_faults_lose_no_byte_and_no_request() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    faults = survive(3_000, seed).storm.faults
    assert min(faults[verb] for verb in ("create", "map", "unmap", "destroy")) > 50, faults


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(4))
def test_a_hundred_thousand_faults(part: int) -> None:
    """A quarter each, over layouts of their own."""
    seed = random.randrange(1 << 32)
    print("seed", seed, "part", part)
    survive(25_000, seed)


def test_a_pool_that_forgets_what_the_driver_kept_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(pool: PagePool) -> int:
        gone, pool._free = pool._free, []
        pool._owned -= set(gone)
        pool._driver.destroy(gone)
        return len(gone)

    monkeypatch.setattr(PagePool, "_destroy_free", forget)
    with pytest.raises(AssertionError, match=r"left behind|are stuck"):
        Campaign(1).run(1_000)


def test_a_request_that_waits_for_ever_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrowthGate, "is_closed", lambda gate, now: gate.closed_until is not None)
    with pytest.raises(AssertionError, match="are stuck"):
        Campaign(1).run(10_000)
