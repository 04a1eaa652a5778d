"""A load of streamed completions against any OpenAI-shaped server, and what a client saw of it.

Knows a host, a port and HTTP; starts no server and knows no engine. One connection per request, as one-shot clients do.
Prompts are token ids, so that their length is exact.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from xllm_cli.errors import XllmError

REQUEST_SECONDS = 600.0
TOKEN_IDS = 256  # every vocabulary has these; which tokens they are does not change the work of a dense model


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    @property
    def authority(self) -> str:
        """`host:port` as it stands in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Workload(NamedTuple):
    """`requests` prompts of `prompt_tokens` random ids, `concurrency` at a time, `output_tokens` out of each."""

    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int


class Timing(NamedTuple):
    """One request: seconds to its first token, seconds between tokens after it, how many tokens came, and how many of
    the prompt's were computed, not found in a cache."""

    first: float
    between: float
    tokens: int
    computed: int


class LoadResult(NamedTuple):
    """One run of a workload: wall seconds, tokens out, and the medians over its requests in seconds."""

    seconds: float
    tokens: int
    first: float
    between: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class LoadError(XllmError):
    """The server refused a request, cut its stream or took longer than REQUEST_SECONDS."""


def run_load(address: Address, workload: Workload, *, seed: int) -> LoadResult:
    """Run the workload to its end. Equal seeds send equal prompts; another seed avoids hits in a prefix cache.

    Raises LoadError when any request fails: a number with failures in it is no number.
    """
    return asyncio.run(_run(address, workload, random.Random(seed)))


async def _run(address: Address, workload: Workload, numbers: random.Random) -> LoadResult:
    prompts = [[numbers.randrange(TOKEN_IDS) for _ in range(workload.prompt_tokens)] for _ in range(workload.requests)]
    waiting = iter(prompts)
    timings: list[Timing] = []

    async def client() -> None:
        for prompt in waiting:
            timing = await complete(address, prompt, workload.output_tokens)
            timings.append(timing)

    start = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workload.concurrency):
                group.create_task(client())
    except ExceptionGroup as failed:
        first = failed.exceptions[0]
        raise LoadError(f"{type(first).__name__}: {first}") from first
    return LoadResult(
        seconds=time.perf_counter() - start,
        tokens=sum(timing.tokens for timing in timings),
        first=statistics.median(timing.first for timing in timings),
        between=statistics.median(timing.between for timing in timings),
    )


async def complete(address: Address, prompt: list[int], output_tokens: int, *, model: str = "") -> Timing:
    """One streamed completion that ignores end tokens; of the server's first model unless another is named."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first = last = start
    tokens, computed = 0, len(prompt)
    async with asyncio.timeout(REQUEST_SECONDS):
        async for event in _events(address, json.dumps(body).encode()):
            if "error" in event:
                raise LoadError(f"the server answered {event['error']}")
            if event.get("choices"):
                last = time.perf_counter()
                first = last if first == start else first
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
                computed -= (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if not tokens:
        raise LoadError("the stream ended without usage")
    return Timing(first=first - start, between=(last - first) / max(1, tokens - 1), tokens=tokens, computed=computed)


async def _events(address: Address, body: bytes) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of the event stream that answers POST /v1/completions."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.authority}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode()
        if not answer.startswith("HTTP/1.1 200"):
            raise LoadError(f"the server answered {answer.splitlines()[0]}: {(await reader.read(2000)).decode()}")
        pending = b""
        async for chunk in _chunks(reader):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield json.loads(line[len(b"data: ") :])
    except asyncio.IncompleteReadError as error:
        raise LoadError("the server closed the connection inside an answer") from error
    finally:
        writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body in HTTP's chunked transfer coding: hexadecimal size, CRLF, that many bytes, CRLF; size 0 ends it."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
