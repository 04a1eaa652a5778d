"""How block tables meet the prefix index: which of its blocks a table takes over, and which of its own it publishes.

Owns the hashing of tables' tokens. Knows neither memory nor plans.
"""

from __future__ import annotations

from collections.abc import Sequence

from xllm_cli.cache.blocks import BlockPool, BlockTable
from xllm_cli.cache.prefix import KeyMaker, PrefixIndex


class PrefixMatcher:
    """Follows and extends tables' chains of index entries. `keys` None: the prefix cache is off, nothing matches."""

    def __init__(self, index: PrefixIndex, pool: BlockPool, keys: KeyMaker | None) -> None:
        self._index = index
        self._pool = pool
        self._keys = keys

    def match(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Retain the cached blocks that continue `table`, leaving at least one of `tokens` to compute.

        Continues after the blocks held already; while one of them is not published there is nothing to add.
        """
        keys = self._keys
        if keys is None or not self._is_current(table):
            return
        first = len(table.chain)
        if first == len(table.blocks):
            limit = min((len(tokens) - 1) // keys.block_size, keys.num_full(len(tokens)))
            keys.extend(table.keys, tokens, limit, media=table.media, salt=table.salt)
            self._follow(table, limit)
            if not first:
                table.cached_tokens = len(table.chain) * keys.block_size
                table.queried_tokens = len(tokens)

    def _follow(self, table: BlockTable, limit: int) -> None:
        parent = table.chain[-1] if table.chain else None
        for key in table.keys[len(table.chain) : limit]:
            entry = self._index.find(parent, key)
            if entry is None:
                break
            self._pool.retain(entry.block)
            self._index.make_used(entry)
            table.blocks.append(entry.block)
            table.chain.append(entry)
            parent = entry

    def publish(self, table: BlockTable, tokens: Sequence[int], num_written: int, *, provisional: bool) -> None:
        """Enter every full block within the first `num_written` tokens; see CacheManager.publish."""
        keys = self._keys
        if keys is None or not self._is_current(table):
            return
        count = min(num_written // keys.block_size, keys.num_full(len(tokens)), len(table.blocks))
        if not provisional:
            self._confirm(table, count)
        if count > len(table.chain):
            keys.extend(table.keys, tokens, count, media=table.media, salt=table.salt)
            for block in range(len(table.chain), count):
                parent = table.chain[-1] if table.chain else None
                entry = self._index.publish(parent, table.keys[block], table.blocks[block], provisional=provisional)
                if entry is None:
                    break
                table.chain.append(entry)

    def _confirm(self, table: BlockTable, count: int) -> None:
        for block in range(min(count, len(table.chain)) - 1, -1, -1):
            entry = table.chain[block]
            if not entry.provisional:
                break
            if entry.block == table.blocks[block]:
                self._index.confirm(entry)

    def _is_current(self, table: BlockTable) -> bool:
        """Whether the table's blocks, if any, are younger than the last forget_all.

        Entries forgotten under it leave its chain: the next publish() enters its own blocks in their place.
        """
        if not table.blocks:
            table.epoch = self._index.epoch
        while table.chain and not table.chain[-1].alive:
            table.chain.pop()
        return table.epoch == self._index.epoch
