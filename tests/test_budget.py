"""The budget's arithmetic: every cap by itself, then all of them over every input."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xllm_cli.cache.account import Account, GrowthGate
from xllm_cli.cache.budget import Limits, Usage, explain, floor_bytes, headroom, keep_free, possible
from xllm_cli.core import Observation

GIB = 1 << 30
MIB = 1 << 20
DEVICE = Observation(total=100 * GIB, free=60 * GIB)
WIDE = Limits(arena_bytes=100 * GIB, host=False)

sizes = st.integers(0, 1 << 44)
observations = st.lists(
    st.builds(Observation, total=sizes, free=sizes, execution_room=sizes, owned=sizes, free_handles=sizes), max_size=3
)
limits = st.builds(
    Limits,
    arena_bytes=sizes,
    max_cache_size=sizes | st.just(0),
    ratio=st.just(0.0) | st.floats(0.01, 1.0),
    limit=st.none() | sizes,
    own_limit=st.none() | sizes,
    reserve=sizes,
    elastic=st.booleans(),
    pool_bytes=sizes,
    host=st.booleans(),
)
usages = st.builds(
    Usage, kv_mapped=sizes, weights_mapped=sizes, weights_on_device=sizes, state=sizes, created=sizes,
    weights_asleep=sizes, kv_elsewhere=sizes, weights_elsewhere=sizes,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "usage", "bytes_left", "limited_by"),
    [
        ({}, Usage(), 60 * GIB, "free_memory"),
        ({"arena_bytes": 10 * GIB}, Usage(kv_mapped=2 * GIB, state=GIB), 7 * GIB, "arena"),
        ({"arena_bytes": 10 * GIB}, Usage(weights_mapped=9 * GIB), GIB, "arena"),
        ({"max_cache_size": 4 * GIB}, Usage(kv_mapped=GIB, weights_mapped=50 * GIB), 3 * GIB, "max_cache_size"),
        ({"limit": GIB}, Usage(kv_mapped=3 * GIB), -2 * GIB, "limit"),
        ({"limit": 0}, Usage(), 0, "limit"),
        ({"own_limit": GIB}, Usage(kv_mapped=3 * GIB), -2 * GIB, "limit"),
        ({"limit": 9 * GIB}, Usage(kv_mapped=3 * GIB, kv_elsewhere=4 * GIB), 2 * GIB, "limit"),
        ({"own_limit": 9 * GIB}, Usage(kv_mapped=3 * GIB, kv_elsewhere=4 * GIB), 6 * GIB, "limit"),
        ({"max_cache_size": 4 * GIB}, Usage(kv_mapped=GIB, kv_elsewhere=GIB), 2 * GIB, "max_cache_size"),
        ({"arena_bytes": 10 * GIB}, Usage(GIB, 2 * GIB, kv_elsewhere=GIB, weights_elsewhere=3 * GIB), 3 * GIB, "arena"),
        ({"reserve": 20 * GIB}, Usage(), 40 * GIB, "free_memory"),
        ({"ratio": 0.5}, Usage(), 10 * GIB, "free_memory"),
        ({}, Usage(created=GIB), 59 * GIB, "free_memory"),
    ],
)
def test_each_cap(change: dict[str, object], usage: Usage, bytes_left: int, limited_by: str) -> None:
    room = headroom([DEVICE], replace(WIDE, **change), usage)
    assert (room.bytes, room.limited_by) == (bytes_left, limited_by)


def test_the_ratio_caps_what_is_owned() -> None:
    seen = replace_seen(DEVICE, free=51 * GIB, owned=49 * GIB)
    room = headroom([seen], replace(WIDE, ratio=0.5), Usage())
    assert (room.bytes, room.limited_by) == (1 * GIB, "max_memory_utilization")


def test_weights_outside_the_pool_count_although_the_system_calls_them_free() -> None:
    seen = replace_seen(DEVICE, free=98 * GIB, owned=10 * GIB)
    room = headroom([seen], WIDE, Usage(kv_mapped=7 * GIB, weights_mapped=3 * GIB, weights_on_device=43 * GIB))
    assert (room.bytes, room.limited_by) == ((100 - 10 - 40) * GIB, "free_memory")


def test_a_fixed_pool_grows_into_its_free_handles_only() -> None:
    seen = replace_seen(DEVICE, free_handles=3 * GIB)
    room = headroom([seen], replace(WIDE, elastic=False, ratio=0.8), Usage())
    assert (room.bytes, room.limited_by, room.deficit) == (3 * GIB, "pool", 0)


def test_the_least_rank_decides() -> None:
    ranks = [DEVICE, replace_seen(DEVICE, free=5 * GIB), DEVICE]
    assert headroom(ranks, WIDE, Usage()).bytes == 5 * GIB


def test_nothing_grows_before_an_observation() -> None:
    assert headroom([], WIDE, Usage()).bytes == 0
    assert headroom([], replace(WIDE, elastic=False), Usage()).limited_by == "pool"


def test_below_the_floor_the_deficit_is_told() -> None:
    seen = replace_seen(DEVICE, free=1 * GIB, execution_room=3 * GIB, free_handles=GIB)
    room = headroom([seen], replace(WIDE, reserve=GIB), Usage())
    assert (room.bytes, room.deficit) == (GIB, 3 * GIB)


@pytest.mark.parametrize(
    ("total", "ratio", "host", "floor"),
    [
        (100 * GIB, 0.0, False, 0),
        (100 * GIB, 0.75, False, 25 * GIB),
        (100 * GIB, 0.0, True, GIB),
        (GIB, 0.0, True, 64 * MIB),
        (100 * GIB, 0.75, True, 25 * GIB),
    ],
)
def test_floor(total: int, ratio: float, host: bool, floor: int) -> None:
    assert floor_bytes(total, Limits(arena_bytes=0, ratio=ratio, host=host)) == floor


def test_keep_free_is_floor_room_and_reserve_of_the_worst_rank() -> None:
    ranks = [replace_seen(DEVICE, execution_room=room * GIB) for room in (1, 4, 2)]
    assert keep_free(ranks, replace(WIDE, ratio=0.75, reserve=GIB)) == (25 + 4 + 1) * GIB
    assert keep_free(ranks, replace(WIDE, elastic=False)) == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 80 * GIB),
        ({"ratio": 0.5}, 30 * GIB),
        ({"max_cache_size": 8 * GIB}, 8 * GIB),
        ({"arena_bytes": 25 * GIB}, 5 * GIB),
        ({"elastic": False, "pool_bytes": 24 * GIB}, 21 * GIB),
        ({"elastic": False, "pool_bytes": 24 * GIB, "ratio": 0.2}, 21 * GIB),
        ({"limit": GIB, "reserve": GIB}, 80 * GIB),
    ],
)
def test_possible(change: dict[str, object], expected: int) -> None:
    usage = Usage(weights_on_device=20 * GIB, weights_mapped=3 * GIB, state=GIB, padding=MIB)
    assert possible([DEVICE], replace(WIDE, **change), usage)[0] == expected - GIB - MIB


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"arena_bytes": GIB}, "arena"),
        ({"max_cache_size": GIB}, "max_cache_size"),
        ({"ratio": 0.5}, "max_memory_utilization"),
        ({"elastic": False, "pool_bytes": GIB}, "pool"),
        ({"host": True}, "free_memory"),
    ],
)
def test_what_caps_the_possible_is_named(change: dict[str, object], name: str) -> None:
    assert possible([DEVICE], replace(WIDE, **change), Usage())[1] == name


@given(observations, limits, usages)
def test_headroom_is_never_above_any_cap(seen: list[Observation], caps: Limits, usage: Usage) -> None:
    room = headroom(seen, caps, usage)
    kv = usage.kv_mapped + usage.state
    everybodys = kv + usage.kv_elsewhere
    assert room.bytes <= caps.arena_bytes - usage.weights_mapped - usage.weights_elsewhere - everybodys
    assert not caps.max_cache_size or room.bytes <= caps.max_cache_size - everybodys
    assert caps.limit is None or room.bytes <= caps.limit - everybodys
    assert caps.own_limit is None or room.bytes <= caps.own_limit - kv
    for rank in seen if caps.elastic else ():
        spared = rank.free - floor_bytes(rank.total, caps) - rank.execution_room - caps.reserve
        there = rank.owned + max(0, usage.weights_on_device - usage.weights_mapped - usage.weights_asleep)
        assert room.bytes <= rank.free_handles + max(0, spared)
        assert room.bytes <= rank.free_handles + max(0, rank.total - there)
        assert room.deficit >= -spared
        assert not caps.ratio or room.bytes <= caps.ratio * rank.total - rank.owned + 1


@given(observations, limits, usages)
def test_the_terms_are_what_headroom_is_the_least_of(seen: list[Observation], caps: Limits, usage: Usage) -> None:
    room = headroom(seen, caps, usage)
    names = {name for _, name in room.terms}
    assert (room.bytes, room.limited_by) == min(room.terms, key=lambda term: term[0])
    assert ("max_cache_size" in names) == (caps.max_cache_size > 0) and ("limit" in names) == (
        caps.limit is not None or caps.own_limit is not None
    )
    assert ("free_memory" in names) == caps.elastic and ("pool" in names) != caps.elastic


@given(observations, limits, usages, sizes)
def test_headroom_follows_free_memory(seen: list[Observation], caps: Limits, usage: Usage, more: int) -> None:
    freer = [replace_seen(rank, free=rank.free + more) for rank in seen]
    before, after = headroom(seen, caps, usage), headroom(freer, caps, usage)
    assert before.bytes <= after.bytes <= before.bytes + more
    assert after.deficit <= before.deficit


@given(observations, limits, usages, sizes)
def test_what_was_created_since_is_taken_off(seen: list[Observation], caps: Limits, usage: Usage, more: int) -> None:
    later = usage._replace(created=usage.created + more)
    assert headroom(seen, caps, later).bytes <= headroom(seen, caps, usage).bytes


@given(observations, limits, usages)
def test_possible_is_at_least_what_may_be_held_now(seen: list[Observation], caps: Limits, usage: Usage) -> None:
    usage = usage._replace(weights_on_device=0, weights_mapped=0, weights_asleep=0, padding=0, created=0)
    pool = min((rank.free_handles for rank in seen), default=0) + usage.kv_mapped
    caps = replace(caps, pool_bytes=max(pool, caps.pool_bytes), limit=None)
    honest = [rank for rank in seen if rank.free + usage.kv_mapped <= rank.total and rank.owned >= usage.kv_mapped]
    room = headroom([replace_seen(rank, free_handles=0) for rank in honest], caps, usage)
    if caps.elastic and honest and room.bytes > 0:
        assert usage.kv_mapped + room.bytes <= possible(honest, caps, usage)[0]


def test_weights_asleep_are_neither_outside_the_pool_nor_room_for_it() -> None:
    asleep = Usage(weights_on_device=20 * GIB, weights_asleep=20 * GIB)
    seen = replace_seen(DEVICE, free=98 * GIB)
    assert headroom([seen], WIDE, asleep) == headroom([seen], WIDE, Usage())
    assert possible([seen], replace(WIDE, elastic=False, pool_bytes=24 * GIB), asleep)[0] == 4 * GIB


@pytest.mark.parametrize(
    ("caps", "usage", "text"),
    [
        ({"limit": 5}, Usage(kv_mapped=2), "limit 5 - KV 2 - state 0"),
        ({"limit": 5}, Usage(kv_mapped=2, kv_elsewhere=1), "limit 5 - KV 2 - state 0 - KV of other models 1"),
        ({"limit": 9, "own_limit": 3}, Usage(kv_mapped=2, kv_elsewhere=1), "limit of this model 3 - KV 2 - state 0"),
        ({"limit": 3, "own_limit": 9}, Usage(kv_mapped=2), "limit 3 - KV 2 - state 0"),
    ],
)
def test_the_tighter_limit_explains_itself(caps: dict[str, int], usage: Usage, text: str) -> None:
    assert explain("limit", [DEVICE], replace(WIDE, **caps), usage) == text


def test_room_for_weights_is_what_arena_and_ratio_leave() -> None:
    account = Account(replace(WIDE, ratio=0.5, arena_bytes=50 * GIB), Usage(kv_mapped=GIB))
    account.set_elsewhere(kv=2 * GIB, weights=3 * GIB)
    account.observe((replace_seen(DEVICE, owned=10 * GIB, free_handles=GIB),))
    assert account.room_for_weights(in_arena=True) == 41 * GIB == account.room_for_weights(in_arena=False)
    account.set_elsewhere(kv=2 * GIB, weights=30 * GIB)
    assert account.room_for_weights(in_arena=True) == 17 * GIB


def test_growth_is_the_headroom_or_minus_the_deficit() -> None:
    account = Account(replace(WIDE, ratio=0.5), Usage())
    account.observe((replace_seen(DEVICE, free=40 * GIB, free_handles=GIB),))
    assert (account.headroom().bytes, account.growth) == (GIB, -10 * GIB)
    account.observe((DEVICE,))
    assert account.growth == 10 * GIB


def test_acknowledged_growth_counts_until_the_next_observation() -> None:
    account = Account(WIDE, Usage())
    account.observe((DEVICE,))
    account.moved(kv_mapped=GIB, created=GIB)
    assert account.growth == 59 * GIB
    account.moved(kv_mapped=0, created=-GIB)
    account.moved(kv_mapped=0, created=-GIB)
    assert account.growth == 60 * GIB
    account.observe((DEVICE,))
    assert account.growth == 60 * GIB


def test_the_gate_closes_for_ten_milliseconds_doubling_to_a_second() -> None:
    gate, now, pauses = GrowthGate(), 50.0, []
    for _ in range(9):
        gate.failed(now)
        assert gate.is_closed(now) and gate.closed_until is not None
        pauses.append(round(gate.closed_until - now, 6))
        now = gate.closed_until
        assert not gate.is_closed(now)
    assert pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]
    gate.succeeded()
    gate.failed(now)
    assert gate.closed_until == pytest.approx(now + 0.01)


def test_closing_twice_keeps_the_later_end() -> None:
    gate = GrowthGate()
    gate.close(9.0)
    gate.close(5.0)
    assert gate.is_closed(8.9) and not gate.is_closed(9.0)


def replace_seen(seen: Observation, **changes: int) -> Observation:
    return Observation(**{name: changes.get(name, getattr(seen, name)) for name in Observation.__struct_fields__})


@given(observations, limits, usages, sizes)
def test_what_must_stay_free_only_takes_away(seen: list[Observation], caps: Limits, usage: Usage, more: int) -> None:
    greedier = [replace_seen(rank, execution_room=rank.execution_room + more) for rank in seen]
    reserved = replace(caps, reserve=caps.reserve + more)
    before = headroom(seen, caps, usage)
    for after in (headroom(greedier, caps, usage), headroom(seen, reserved, usage)):
        assert before.bytes - more <= after.bytes <= before.bytes
        assert before.deficit <= after.deficit <= before.deficit + more
    assert keep_free(seen, caps) <= keep_free(greedier, caps) <= keep_free(seen, caps) + more


@given(observations, limits, usages)
def test_every_limit_can_be_explained_with_its_numbers(seen: list[Observation], caps: Limits, usage: Usage) -> None:
    room = headroom(seen, caps, usage)
    for _, name in room.terms:
        text = explain(name, seen, caps, usage)
        assert text and "None" not in text
    if room.limited_by == "limit":
        limit, *used = map(int, re.findall(r"\d+", explain("limit", seen, caps, usage)))
        assert limit - sum(used) == room.bytes


def test_the_sum_in_words_is_the_sum() -> None:
    seen = replace_seen(DEVICE, execution_room=3, free_handles=7)
    caps, usage = replace(WIDE, reserve=5, ratio=0.5), Usage(created=2)
    text = explain("free_memory", [seen], caps, usage)
    free, floor, room, reserve, zero, handles, created = (int(n) for n in re.findall(r"\d+", text))
    assert (free, created, floor, room, reserve) == (60 * GIB, 2, 50 * GIB, 3, 5)
    assert max(zero, free - floor - room - reserve) + handles - created == headroom([seen], caps, usage).bytes


@given(observations, limits, usages)
def test_the_growth_of_an_account_is_the_headroom_or_minus_what_is_lacking(
    seen: list[Observation], caps: Limits, usage: Usage
) -> None:
    account = Account(caps, usage._replace(created=0))
    account.observe(tuple(seen))
    room = account.headroom()
    assert account.growth <= room.bytes
    assert account.growth == (min(room.bytes, -room.deficit) if room.deficit else room.bytes)
    assert account.possible() >= 0
