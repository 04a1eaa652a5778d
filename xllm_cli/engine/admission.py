"""What a request may ask for: refused at once, clipped, or let in; and what is said when memory never came.

Owns the numbers in those answers. Knows the cache's possible bytes, no queue and no plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xllm_cli.cache.budget import Headroom
from xllm_cli.cache.manager import CacheManager
from xllm_cli.core import LimitedBy, Request
from xllm_cli.engine.sequence import Sequence
from xllm_cli.errors import RequestError

# what to change when a request can never fit, by what caps it
MORE_ROOM: Mapping[LimitedBy, str] = {
    "arena": "raise --max_memory_utilization",
    "max_memory_utilization": "raise --max_memory_utilization",
    "max_cache_size": "raise --max_cache_size",
    "limit": "raise the limit (xllm vmm limit, POST /vmm/limit)",
    "pool": "raise --max_cache_size or --max_memory_utilization",
    "free_memory": "use a device with more memory (on cpu: raise --host_memory_bytes)",
}


def mappable_bytes(cache: CacheManager, headroom: Headroom) -> int:
    """What of a headroom is whole pages: less can be a lack although it is more than the blocks that are wanted."""
    return max(0, headroom.bytes) // cache.page_bytes * cache.page_bytes


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What one request may ask for, and how long the head of the queue waits for memory with nothing running."""

    max_model_len: int
    vocab_size: int
    longest_prompt: int
    memory_wait_seconds: float
    random_seed: int


class Admission:
    """Judges requests against the context, the vocabulary and the most that the cache could ever hold."""

    def __init__(self, cache: CacheManager, limits: ServingLimits) -> None:
        self._cache = cache
        self._limits = limits

    def check(self, request: Request) -> int:
        """The sequence's token limit; RequestError if the request can never be served."""
        limits, prompt, asked = self._limits, len(request.prompt_ids), request.sampling.max_tokens
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        least = 1 if request.sampling.prompt_logprobs is None else 0
        if asked is not None and asked < least:
            raise RequestError(f"max_tokens is {asked}; it must be at least {least}, or unset", param="max_tokens")
        bad = next((t for t in request.prompt_ids if not 0 <= t < limits.vocab_size), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is not in the vocabulary of {limits.vocab_size}", param="prompt")
        wanted = 1 if asked is None else asked
        if prompt + wanted > limits.max_model_len:
            raise RequestError(
                f"the prompt has {prompt} tokens and max_tokens is {wanted}: together more than the context of "
                f"{limits.max_model_len} tokens",
                code="context_length_exceeded",
                param="prompt",
            )
        if prompt > limits.longest_prompt:
            raise RequestError(
                f"the prompt has {prompt} tokens; without --enable_chunked_prefill it must fit into "
                f"--max_tokens_per_batch={limits.longest_prompt}",
                code="context_length_exceeded",
                param="prompt",
            )
        return self._clip_to_memory(prompt, asked)

    def _clip_to_memory(self, prompt: int, asked: int | None) -> int:
        """Refuse what could not fit even alone; clip a length that was not asked for (DESIGN.md §7)."""
        possible = self._cache.possible_tokens()
        # the last token's KV is never written
        if prompt + (asked or 1) - 1 > possible:
            needed = self._bytes_for(prompt + (asked or 1) - 1)
            raise RequestError(
                f"the request needs {needed} bytes of KV cache for {prompt} prompt tokens and max_tokens {asked or 1}; "
                f"at most {self._cache.possible_bytes()} bytes ({possible} tokens) are possible. Lower max_tokens, or "
                f"{MORE_ROOM[self._cache.possible_limited_by()]}",
                code="kv_capacity_exceeded",
                param="max_tokens" if asked else "prompt",
            )
        return min(self._limits.max_model_len - prompt, possible + 1 - prompt) if asked is None else asked

    def _bytes_for(self, tokens: int) -> int:
        return self._cache.blocks_for(tokens) * self._cache.spec.bytes_per_block

    def shortage(self, sequence: Sequence, exhausted: str) -> RequestError:
        """Why a waiting sequence is given up. `exhausted`: what the device said to its last step, "" if it had none."""
        seconds = self._limits.memory_wait_seconds
        retry_after = max(1, round(seconds))
        if exhausted:
            return RequestError(
                f"no memory to compute in for {seconds:g} s: {exhausted}. Raise --vmm_memory_reserve_bytes, so that "
                "the KV cache leaves more",
                status=503,
                code="execution_memory_unavailable",
                retry_after=retry_after,
            )
        cache = self._cache
        needed, headroom = min(len(sequence.tokens) + cache.block_size, sequence.most_positions), cache.headroom()
        limit = f"{headroom.limited_by}: {cache.explain_headroom()}"
        return RequestError(
            f"no memory for {seconds:g} s: {self._bytes_for(needed)} bytes of KV cache are needed, "
            f"{mappable_bytes(cache, headroom)} may be mapped now in whole pages (limited by {limit}). Retry later, or "
            f"{MORE_ROOM[headroom.limited_by]}",
            status=503,
            code="kv_memory_unavailable",
            retry_after=retry_after,
        )
