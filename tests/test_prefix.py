"""The index: what a key covers, what a hit means, and who is forgotten first."""

from __future__ import annotations

import random
import struct
from itertools import count

import pytest
import xxhash

from xllm_cli.cache.prefix import BlockKey, Entry, KeyMaker, PrefixIndex
from xllm_cli.core import MediaSpan

SEED = 1024


def keys_of(
    tokens: list[int], *, maker: KeyMaker | None = None, media: tuple[MediaSpan, ...] = (), salt: str = ""
) -> list[BlockKey]:
    maker = maker or KeyMaker(block_size=4, seed=SEED)
    keys: list[BlockKey] = []
    maker.extend(keys, tokens, maker.num_full(len(tokens)), media=media, salt=salt)
    return keys


def publish_chain(index: PrefixIndex, tokens: list[int], blocks: list[int], **how: bool) -> list[Entry]:
    chain: list[Entry] = []
    for key, block in zip(keys_of(tokens), blocks, strict=True):
        entry = index.publish(chain[-1] if chain else None, key, block, **how)
        assert entry is not None
        chain.append(entry)
    return chain


def make_index(page_use: dict[int, int] | None = None) -> PrefixIndex:
    return PrefixIndex(lambda block: (page_use or {}).get(block, 0), count(1))


# --- keys


def test_the_digest_is_xxh3_over_parent_tokens_media_and_salt() -> None:
    image = MediaSpan(start=5, length=2, digest=b"cat")
    first, second = keys_of(list(range(8)), media=(image,), salt="tenant")
    packed = [struct.pack("<4i", *range(0, 4)), struct.pack("<4i", *range(4, 8))]
    assert first.digest == xxhash.xxh3_128_digest(packed[0] + b"tenant", SEED)
    assert second.digest == xxhash.xxh3_128_digest(first.digest + packed[1] + b"cat" + b"tenant", SEED)


def test_only_full_blocks_have_keys() -> None:
    assert [len(keys_of(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_different_early_token_changes_every_later_digest() -> None:
    for same, other in zip(keys_of([1] * 12), keys_of([2] + [1] * 11), strict=True):
        assert same.digest != other.digest


def test_salt_and_seed_separate() -> None:
    plain, salted = keys_of([1] * 4), keys_of([1] * 4, salt="a")
    reseeded = keys_of([1] * 4, maker=KeyMaker(block_size=4, seed=7))
    assert len({key[0].digest for key in (plain, salted, reseeded)}) == 3


def test_same_placeholders_with_another_image_differ_from_where_it_begins() -> None:
    cat, dog = (keys_of([9] * 16, media=(MediaSpan(start=5, length=6, digest=d),)) for d in (b"cat", b"dog"))
    assert [a.digest == b.digest for a, b in zip(cat, dog, strict=True)] == [True, False, False, False]
    assert [key.media for key in cat] == [(), (b"cat",), (b"cat",), ()]


@pytest.mark.parametrize(("start", "length", "blocks"), [(0, 4, [0]), (3, 2, [0, 1]), (4, 4, [1]), (0, 12, [0, 1, 2])])
def test_a_media_item_counts_in_every_block_it_overlaps(start: int, length: int, blocks: list[int]) -> None:
    keys = keys_of([9] * 12, media=(MediaSpan(start=start, length=length, digest=b"x"),))
    assert [i for i, key in enumerate(keys) if key.media] == blocks


def test_two_media_items_in_one_block_keep_their_order() -> None:
    a, b = MediaSpan(start=0, length=2, digest=b"a"), MediaSpan(start=2, length=2, digest=b"b")
    assert keys_of([9] * 4, media=(a, b))[0].media == (b"a", b"b")


def test_each_block_is_hashed_once() -> None:
    calls: list[bytes] = []
    maker = KeyMaker(block_size=4, seed=SEED, digest=lambda data: calls.append(data) or bytes([len(calls)]))
    keys: list[BlockKey] = []
    for known in (4, 9, 9, 16):
        maker.extend(keys, list(range(16)), maker.num_full(known), media=(), salt="")
    assert len(calls) == len(keys) == 4


def test_lookahead_covers_the_following_token() -> None:
    maker = KeyMaker(block_size=4, seed=SEED, lookahead=1)
    assert [maker.num_full(n) for n in (0, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]
    one, other = keys_of([1, 1, 1, 1, 5, 5, 5, 5, 5], maker=maker), keys_of([1, 1, 1, 1, 6, 5, 5, 5, 5], maker=maker)
    assert one[0].digest != other[0].digest, "a fork at the boundary must lose the block before it"


def test_lookahead_sees_media_that_begins_at_the_boundary() -> None:
    maker = KeyMaker(block_size=4, seed=SEED, lookahead=1)
    keys = keys_of([9] * 9, maker=maker, media=(MediaSpan(start=4, length=2, digest=b"x"),))
    assert [key.media for key in keys] == [(b"x",), (b"x",)]


# --- finding


def test_a_published_chain_is_found_by_its_tokens() -> None:
    index = make_index()
    publish_chain(index, [1] * 8, [10, 11])
    first = index.find(None, keys_of([1] * 4)[0])
    assert first is not None and first.block == 10
    second = index.find(first, keys_of([1] * 8)[1])
    assert second is not None and second.block == 11
    assert index.find(None, keys_of([2] * 4)[0]) is None


@pytest.mark.parametrize("other", [[2] * 4, [1, 1, 1, 2]])
def test_equal_hashes_of_different_tokens_do_not_hit(other: list[int]) -> None:
    maker = KeyMaker(block_size=4, seed=SEED, digest=lambda data: b"always the same")
    index = make_index()
    assert index.publish(None, keys_of([1] * 4, maker=maker)[0], 10) is not None
    assert index.find(None, keys_of(other, maker=maker)[0]) is None
    assert index.publish(None, keys_of(other, maker=maker)[0], 11) is None
    assert len(index) == 1


def test_equal_hashes_under_another_parent_salt_or_image_do_not_hit() -> None:
    index = make_index()
    first, second = publish_chain(index, [1] * 8, [10, 11])
    key = second.key
    assert index.find(first, key) is second
    assert index.find(None, key) is None
    assert index.find(first, key._replace(salt="other")) is None
    assert index.find(first, key._replace(media=(b"cat",))) is None


def test_publishing_what_is_present_returns_the_present_entry() -> None:
    index = make_index()
    (entry,) = publish_chain(index, [1] * 4, [10])
    assert index.publish(None, entry.key, 20) is entry
    assert index.entry_of(20) is None and index.entry_of(10) is entry


# --- forgetting


def test_a_forgotten_block_is_not_found_under_its_old_digest() -> None:
    index = make_index()
    (entry,) = publish_chain(index, [1] * 4, [10])
    index.make_idle(entry)
    assert index.evict(1) == [10] and not entry.alive
    assert index.find(None, entry.key) is None and index.entry_of(10) is None


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    index = make_index()
    for entry in publish_chain(index, [1] * 16, [10, 11, 12, 13]):
        index.make_idle(entry)
    assert index.evict(3) == [13, 12, 11]
    index.check(lambda block: False)


def test_the_least_recently_used_plan_goes_first() -> None:
    index = make_index()
    chains = []
    for token, block in ((1, 10), (2, 20), (3, 30)):
        chains.append(publish_chain(index, [token] * 8, [block, block + 1]))
        index.tick()
    for chain in (chains[1], chains[0], chains[2]):
        for entry in chain:
            index.make_idle(entry)
        index.tick()
    assert index.evict(6) == [21, 20, 11, 10, 31, 30]


def test_among_equals_the_block_on_the_emptiest_page_goes_first() -> None:
    index = make_index({10: 3, 20: 1, 30: 2})
    for token, block in ((1, 10), (2, 20), (3, 30)):
        index.make_idle(publish_chain(index, [token] * 4, [block])[0])
    assert index.evict(3) == [20, 30, 10]


def test_entries_in_use_do_not_count_as_evicted() -> None:
    index = make_index()
    entries = [publish_chain(index, [token] * 4, [token])[0] for token in range(6)]
    for entry in entries[::2]:
        index.make_idle(entry)
    assert sorted(index.evict(3)) == [0, 2, 4]
    assert index.evict(1) == []


def test_a_parent_is_never_older_than_its_child() -> None:
    index = make_index()
    head, tail = publish_chain(index, [1] * 8, [10, 11])
    (other,) = publish_chain(index, [2] * 4, [20])
    index.make_idle(head)
    index.tick()
    index.make_idle(other)
    index.tick()
    index.make_idle(tail)
    assert index.evict(3) == [20, 11, 10]


def test_forgetting_a_parent_unpublishes_the_blocks_still_in_use() -> None:
    index = make_index()
    head, tail = publish_chain(index, [1] * 8, [10, 11])
    index.make_idle(head)
    assert index.evict(1) == [10]
    assert not tail.alive and index.entry_of(11) is None and len(index) == 0


def test_forget_all_empties_the_index_and_starts_an_epoch() -> None:
    index = make_index()
    head, _ = publish_chain(index, [1] * 8, [10, 11])
    index.make_idle(publish_chain(index, [2] * 4, [20])[0])
    assert index.forget_all() == [20]
    assert (len(index), index.num_idle, index.epoch, head.alive) == (0, 0, 1, False)


def test_provisional_entries_are_told_until_confirmed() -> None:
    index = make_index()
    head, tail = publish_chain(index, [1] * 8, [10, 11], provisional=True)
    index.confirm(head)
    assert index.provisional() == [tail] and index.has_provisional
    assert index.find(head, tail.key) is tail


def test_check_notices_an_idle_entry_that_is_held() -> None:
    index = make_index()
    index.make_idle(publish_chain(index, [1] * 4, [10])[0])
    index.check(lambda block: False)
    with pytest.raises(AssertionError, match="block 10"):
        index.check(lambda block: True)


def test_random_use_keeps_the_order_of_an_exact_lru() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng, index = random.Random(seed), make_index()
    entries = [publish_chain(index, [token] * 4, [token])[0] for token in range(40)]
    last_use: dict[int, int] = {}
    for entry in entries:
        index.make_idle(entry)
    for moment in range(1, 300):
        index.tick()
        entry = rng.choice(entries)
        index.make_used(entry)
        index.make_idle(entry)
        last_use[entry.block] = moment
    index.check(lambda block: False)
    order = index.evict(len(entries))
    assert [last_use.get(block, 0) for block in order] == sorted(last_use.get(block, 0) for block in order)
