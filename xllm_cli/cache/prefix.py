"""Which full block holds the KV of which tokens: the hash finds, equality decides.

Owns the index, its hashes and the order of eviction. It knows block ids but not who holds them, nor pages.

A key is XXH3-128, seeded, of: parent's digest ‖ tokens as int32 little-endian ‖ digests of the media items overlapping
the block ‖ cache salt. An entry keeps all of these, and a hit compares them, its parent by identity; so two prefixes of
equal hash never share KV. Invariants: an entry's parent is in the index as long as the entry is; a parent was used at
least as lately as its children. Eviction order: least lately used plan, then deepest, then emptiest page. An entry
whose parent is forgotten is forgotten with it; its block, if held, goes on privately.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from xllm_cli.core import MediaSpan

Digest = Callable[[bytes], bytes]


class BlockKey(NamedTuple):
    """One full block of a prompt: its chained digest and what was hashed besides the parent."""

    digest: bytes
    tokens: bytes
    media: tuple[bytes, ...]
    salt: str


class Entry:
    """A published block. `is_idle`: nobody holds it. `provisional`: the running plan is still to write its KV."""

    __slots__ = ("alive", "block", "children", "depth", "is_idle", "key", "parent", "provisional", "stamp")

    def __init__(self, key: BlockKey, parent: Entry | None, block: int, *, provisional: bool) -> None:
        self.key = key
        self.parent = parent
        self.block = block
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[bytes, Entry] = {}
        self.alive = True
        self.is_idle = False
        self.provisional = provisional
        self.stamp = 0


class KeyMaker:
    """Hashes the full blocks of a token sequence.

    `lookahead` is the number of tokens after a block that its hash covers too: 1 where draft KV at a position depends
    on the next token, so that such a block is published only when that token is known.
    """

    def __init__(self, *, block_size: int, seed: int, lookahead: int = 0, digest: Digest | None = None) -> None:
        self.block_size = block_size
        self.lookahead = lookahead
        self._pack = struct.Struct(f"<{block_size + lookahead}i").pack
        self._digest: Digest = digest or (lambda data: xxhash.xxh3_128_digest(data, seed))

    def num_full(self, num_tokens: int) -> int:
        """Blocks whose hash is known once `num_tokens` tokens are."""
        return max(0, num_tokens - self.lookahead) // self.block_size

    def extend(
        self, keys: list[BlockKey], tokens: Sequence[int], count: int, *, media: Sequence[MediaSpan], salt: str
    ) -> None:
        """Append the keys of blocks `[len(keys), count)`; those there already are not hashed again."""
        for index in range(len(keys), count):
            start = index * self.block_size
            stop = start + self.block_size + self.lookahead
            packed = self._pack(*tokens[start:stop])
            items = tuple(span.digest for span in media if span.start < stop and span.start + span.length > start)
            parent = keys[index - 1].digest if index else b""
            digest = self._digest(b"".join((parent, packed, *items, salt.encode())))
            keys.append(BlockKey(digest, packed, items, salt))


class _Generation:
    """The idle entries last used by one plan, at `used_at`; sorted only when eviction comes to them."""

    def __init__(self, used_at: float) -> None:
        self.used_at = used_at
        self.entries: dict[Entry, None] = {}
        self._order: list[Entry] | None = None

    def add(self, entry: Entry) -> None:
        self.entries[entry] = None
        self._order = None

    def next_out(self, page_use: Callable[[int], int]) -> Entry:
        """The entry to evict first: deepest, then on the emptiest page."""
        if self._order is None:
            self._order = sorted(self.entries, key=lambda entry: (entry.depth, -page_use(entry.block)))
        while self._order[-1] not in self.entries:
            self._order.pop()
        return self._order[-1]


class PrefixIndex:
    """Published blocks by digest, and `by_block`. `page_use(block)` tells how many blocks use the block's page;
    `stamps` rises with every plan."""

    def __init__(self, page_use: Callable[[int], int], stamps: Iterator[int]) -> None:
        self.num_idle = 0
        self.epoch = 0
        self._page_use = page_use
        self._stamps = stamps
        self._by_digest: dict[bytes, Entry] = {}
        self.by_block: dict[int, Entry] = {}
        self._idle: OrderedDict[int, _Generation] = OrderedDict()
        self._provisional: dict[Entry, None] = {}
        self._stamp = 0
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._by_digest)

    def entry_of(self, block: int) -> Entry | None:
        """The entry that this very block is published under."""
        return self.by_block.get(block)

    def tick(self, now: float = 0.0) -> None:
        """A plan ends: what is used from here on is younger. `now` is in seconds of the owner's clock."""
        self._stamp = next(self._stamps)
        self._now = now

    @property
    def oldest(self) -> int | None:
        """The stamp of the idle entries that are evicted first; None if there are none."""
        return next(iter(self._idle), None)

    @property
    def oldest_at(self) -> float | None:
        """When those were last used, in seconds of the owner's clock; None if there are none."""
        return next(iter(self._idle.values())).used_at if self._idle else None

    def find(self, parent: Entry | None, key: BlockKey) -> Entry | None:
        """The entry of exactly this prefix, or None."""
        entry = self._by_digest.get(key.digest)
        if entry is None or entry.parent is not parent or entry.key != key:
            return None
        return entry

    def publish(self, parent: Entry | None, key: BlockKey, block: int, *, provisional: bool = False) -> Entry | None:
        """Enter a held block. The digest being present leaves the block private: returns the entry of the same prefix
        then, or None if the two only share the hash."""
        present = self._by_digest.get(key.digest)
        if present is not None:
            return self.find(parent, key)
        assert parent is None or parent.alive, "published under a forgotten parent"
        entry = Entry(key, parent, block, provisional=provisional)
        self._by_digest[key.digest] = entry
        self.by_block[block] = entry
        if parent is not None:
            parent.children[key.digest] = entry
        if provisional:
            self._provisional[entry] = None
        self._touch(entry)
        return entry

    def move(self, block: int, target: int) -> None:
        """An idle entry's KV lies in another block now."""
        entry = self.by_block.pop(block)
        assert entry.is_idle and target not in self.by_block
        entry.block = target
        self.by_block[target] = entry

    def confirm(self, entry: Entry) -> None:
        """The plan ran: a provisional entry is a lasting one."""
        entry.provisional = False
        self._provisional.pop(entry, None)

    @property
    def has_provisional(self) -> bool:
        return bool(self._provisional)

    def provisional(self) -> list[Entry]:
        """The entries whose KV only the running plan writes, parents first."""
        return list(self._provisional)

    # --- idle and used ----------------------------------------------------------------------------------------------

    def make_idle(self, entry: Entry) -> None:
        """Nobody holds the entry's block any more; it is used as of now."""
        assert not entry.is_idle
        entry.is_idle = True
        self.num_idle += 1
        self._file(entry, self._stamp)
        self._touch(entry)

    def make_used(self, entry: Entry) -> None:
        """Somebody holds the entry's block again."""
        if entry.is_idle:
            self._unfile(entry)
            entry.is_idle = False
            self.num_idle -= 1
        self._touch(entry)

    def _touch(self, entry: Entry) -> None:
        """An entry and all its ancestors are used as of now."""
        stamp = self._stamp
        entry.stamp = stamp
        parent = entry.parent
        while parent is not None and parent.stamp != stamp:
            if parent.is_idle:
                self._unfile(parent)
                self._file(parent, stamp)
            parent.stamp = stamp
            parent = parent.parent

    def _file(self, entry: Entry, stamp: int) -> None:
        entry.stamp = stamp
        generation = self._idle.get(stamp)
        if generation is None:
            generation = self._idle[stamp] = _Generation(self._now)
        generation.add(entry)

    def _unfile(self, entry: Entry) -> None:
        generation = self._idle[entry.stamp]
        del generation.entries[entry]
        if not generation.entries:
            del self._idle[entry.stamp]

    # --- forgetting -------------------------------------------------------------------------------------------------

    def evict(self, count: int) -> list[int]:
        """Forget idle entries until `count` idle blocks are out, or none is left; returns their blocks."""
        out: list[int] = []
        while len(out) < count and self._idle:
            out += self.forget(next(iter(self._idle.values())).next_out(self._page_use))
        return out

    def forget(self, entry: Entry) -> list[int]:
        """Remove an entry and all its descendants; returns the blocks among them that nobody holds."""
        if entry.parent is not None:
            del entry.parent.children[entry.key.digest]
        out = []
        pending = [entry]
        while pending:
            gone = pending.pop()
            pending.extend(gone.children.values())
            gone.children = {}
            gone.alive = False
            del self._by_digest[gone.key.digest]
            del self.by_block[gone.block]
            self._provisional.pop(gone, None)
            if gone.is_idle:
                self._unfile(gone)
                gone.is_idle = False
                self.num_idle -= 1
                out.append(gone.block)
        return out

    def forget_all(self) -> list[int]:
        """Empty the index; blocks older than this are never published again. Returns the blocks nobody holds."""
        self.epoch += 1
        out = []
        for root in [entry for entry in self._by_digest.values() if entry.parent is None]:
            out += self.forget(root)
        return out

    def check(self, is_held: Callable[[int], bool]) -> None:
        """Walk every entry: both maps agree, parents are present and at least as young, idle means not held."""
        assert len(self._by_digest) == len(self.by_block)
        for digest, entry in self._by_digest.items():
            assert entry.alive and entry.key.digest == digest and self.by_block[entry.block] is entry
            assert entry.is_idle != is_held(entry.block), f"entry of block {entry.block}: idle is {entry.is_idle}"
            assert entry.provisional == (entry in self._provisional)
            if entry.parent is not None:
                assert entry.parent.alive and entry.parent.children[digest] is entry
                assert entry.parent.stamp >= entry.stamp and entry.depth == entry.parent.depth + 1
        idle = [entry for _, entry in self._idle_entries()]
        assert len(idle) == self.num_idle == sum(entry.is_idle for entry in self._by_digest.values())
        assert all(entry.stamp == stamp for stamp, entry in self._idle_entries())
        assert list(self._idle) == sorted(self._idle), "generations out of order"

    def _idle_entries(self) -> Iterator[tuple[int, Entry]]:
        for stamp, generation in self._idle.items():
            for entry in generation.entries:
                yield stamp, entry
