"""What a device does, measured: pages, their cost, memory, copies, and paged attention against the reference.

    python -m xllm_cli.worker.selftest --device=npu

prints one JSON object a finding. The first thing to run on hardware that nobody has tried: what `differs` from what is
expected is what to report. Knows no model and no request; it takes a few pages and gives them back.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import chain
from statistics import median
from typing import TextIO

import msgspec
import torch

from xllm_cli.core import PageDelta, PageRef
from xllm_cli.errors import XllmError
from xllm_cli.flags import Config
from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.kv_layout import KvLayout
from xllm_cli.models.ops.base import Heads, Ops
from xllm_cli.models.ops.reference import ReferenceOps
from xllm_cli.vmm.arena import Arena
from xllm_cli.vmm.driver import HUGE_PAGE_BYTES, Driver, VmmError
from xllm_cli.vmm.pool import PagePool
from xllm_cli.vmm.weights import WeightArena
from xllm_cli.worker.device import Device, open_device
from xllm_cli.worker.kv_store import VirtualKvStore

PAGES = 32
MIB = 1 << 20
HEADS = Heads(num_heads=8, num_kv_heads=2, head_dim=64)
BLOCK_SIZE = 128
BLOCKS = 12
# (tokens of KV, new tokens among them, blocks): a prompt, the end of one, and a decode, in blocks out of order
SEQUENCES = ((200, 200, (7, 2)), (300, 40, (9, 4, 1)), (257, 1, (3, 8, 5)))
WINDOW = 4  # tokens seen, so few that one more or less shows at once
ATTENTIONS = (("attention", None), ("attention on other pages", None), ("attention in a window", WINDOW))
LARGEST_DIFFERENCE = 0.02  # of attention's output, which is below 1: twice the rounding of bfloat16 on the way


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing about the device. `expected` is empty where nothing in particular is."""

    name: str
    value: str
    expected: str = ""
    differs: bool = False


def examine(device: Device) -> Iterator[Finding]:
    """All findings, in the order in which each needs the one before; the first that fails is the last.

    Raises DeviceError where the device cannot be opened at all.
    """
    with ExitStack() as opened:
        driver = device.open_driver()
        opened.callback(driver.close)
        info = driver.info()
        yield Finding(name="driver", value=f"{info.name}, mode {info.mode}")
        yield _expect("page bytes", info.page_bytes, HUGE_PAGE_BYTES)
        yield Finding(name="memory", value=f"{info.free} bytes free of {info.total}", differs=info.free <= 0)
        ops = device.open_ops()
        for step in (
            lambda: page_costs(driver, device),
            lambda: copies(driver, device),
            lambda: _attention(device, driver, ops),
        ):
            try:
                yield from step()
            except (VmmError, XllmError, RuntimeError) as error:
                yield Finding(name="failure", value=f"{type(error).__name__}: {error}", differs=True)
                return


def _expect(name: str, value: object, expected: object) -> Finding:
    return Finding(name=name, value=str(value), expected=str(expected), differs=value != expected)


# --- pages


def page_costs(driver: Driver, device: Device) -> list[Finding]:
    """Microseconds of each verb for one page, and how free memory follows."""
    page = driver.info().page_bytes
    address, before = driver.reserve(PAGES * page), driver.info().free
    watch, handles = Stopwatch(), []
    for _ in range(PAGES):
        with watch.timing("create"):
            handles += driver.create(1)
    taken = before - driver.info().free
    for number, handle in enumerate(handles):
        with watch.timing("map"):
            driver.map([(address + number * page, handle)])
    with watch.timing("fence"):
        device.fence()
    for number in range(PAGES):
        with watch.timing("unmap"):
            driver.unmap([address + number * page])
    for handle in handles:
        with watch.timing("destroy"):
            driver.destroy([handle])
    driver.release(address, PAGES * page)
    return [*watch.findings(), Finding(name="free memory", value=f"{taken} bytes went with {PAGES} pages of {page}")]


class Stopwatch:
    """How long calls of each verb took."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    @contextmanager
    def timing(self, verb: str) -> Iterator[None]:
        """Count what runs inside as one call of `verb`."""
        started = time.perf_counter()
        yield
        self._seconds.setdefault(verb, []).append(time.perf_counter() - started)

    def seconds(self, verb: str) -> float:
        """Of all calls of a verb together."""
        return sum(self._seconds[verb])

    def findings(self) -> list[Finding]:
        """One finding a verb."""
        return [
            Finding(name=f"{verb} µs", value=f"{median(each) * 1e6:.1f} in the middle, {max(each) * 1e6:.1f} at most")
            for verb, each in self._seconds.items()
        ]


# --- weights


def copies(driver: Driver, device: Device) -> list[Finding]:
    """Bytes put into pages as a loader does, kept on the host as for a light sleep, and brought back into new pages."""
    pool = PagePool(driver, page_bytes=driver.info().page_bytes)
    nbytes = PAGES * pool.page_bytes
    with closing(pool), closing(WeightArena(driver, pool, nbytes, device=device.dlpack, fence=device.fence)) as arena:
        return _there_and_back(device, arena, nbytes)


def _there_and_back(device: Device, arena: WeightArena, nbytes: int) -> list[Finding]:
    drawn = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    there, watch = arena.take(drawn.shape, drawn.dtype), Stopwatch()
    with watch.timing("loaded"), device.guard(), device.open_staging() as staging:
        if staging is None:
            there.copy_(drawn)
        else:
            staging.put(there, drawn)
            staging.finish()
    with closing(device.backups()[0](nbytes)) as backup:
        with watch.timing("kept"):
            backup.write(arena.read)
        arena.discard()
        with watch.timing("brought back"):
            short = arena.restore(backup.fill, settle=backup.settle)
        with device.guard():
            is_same = not short and torch.equal(there.cpu(), drawn)
    loaded, kept, back = (
        f"{nbytes / watch.seconds(verb) / MIB:.0f} MiB/s" for verb in ("loaded", "kept", "brought back")
    )
    return [
        Finding(name="weights loaded", value=f"{loaded}, {'plain copies' if staging is None else 'manual loader'}"),
        Finding(name="weights kept", value=f"{kept}, in {backup.place}"),
        Finding(
            name="weights brought back",
            value=f"{back}, {'the same' if is_same else short or 'other'} bytes",
            expected="the same bytes",
            differs=not is_same,
        ),
    ]


# --- attention


def _attention(device: Device, driver: Driver, ops: Ops) -> Iterator[Finding]:
    """Keys and values written to and read from pages that come, go and come again under the same tensors."""
    layout = KvLayout(1, HEADS.num_kv_heads, HEADS.head_dim, torch.bfloat16, BLOCK_SIZE, ops.kv_layout)
    page, widths = driver.info().page_bytes, [tensor.bytes_per_block for tensor in layout.spec().tensors]
    with ExitStack() as opened:
        pool = PagePool(driver, page_bytes=page)
        arenas = [opened.enter_context(closing(Arena(driver, pool, w * BLOCKS, device.dlpack))) for w in widths]
        store = VirtualKvStore(arenas, pool, page, fence=device.fence)
        opened.callback(store.close)
        pages = tuple(PageRef(i, number) for i, arena in enumerate(arenas) for number in range(arena.num_pages))
        for name, window in ATTENTIONS:
            outcome = store.apply(PageDelta(map=pages), 0)
            if not outcome.mapped:
                yield Finding(name=name, value=f"no pages: {outcome.shortage}", differs=True)
                return
            views = layout.views(store.tensor, BLOCKS)
            with device.guard():
                difference = largest_difference(ops, views[0], window)
            del views
            store.apply(PageDelta(unmap=pages), 0)
            yield Finding(
                name=name,
                value=f"off by {difference:.4f} at most",
                expected=f"{LARGEST_DIFFERENCE} or less",
                differs=not difference <= LARGEST_DIFFERENCE,  # a NaN differs
            )


def largest_difference(ops: Ops, kv: LayerKV, window: int | None = None) -> float:
    """The largest difference of paged attention over `kv` from the reference's on the host."""
    batch, whole = _batch(new_only=True), _batch(new_only=False)
    width = (HEADS.num_heads + 2 * HEADS.num_kv_heads) * HEADS.head_dim
    dtype = ops.activation_dtype(torch.bfloat16)
    drawn = torch.randn(whole.positions.shape[0], width, generator=torch.Generator().manual_seed(1))
    rounded = drawn.to(torch.bfloat16)
    new = rounded[_new_rows()]
    own = torch.empty(2, BLOCKS, HEADS.num_kv_heads, BLOCK_SIZE, HEADS.head_dim, dtype=torch.bfloat16)
    expected = _attended(ReferenceOps(), LayerKV(own[0], own[1]), (whole, rounded), (batch, new), window=window)
    found = _attended(ops, kv, (whole, rounded.to(dtype)), (batch, new.to(dtype)), window=window)
    return float((found.cpu().float() - expected.float()).abs().max())


def _attended(
    ops: Ops,
    kv: LayerKV,
    written: tuple[Batch, torch.Tensor],
    asked: tuple[Batch, torch.Tensor],
    *,
    window: int | None,
) -> torch.Tensor:
    """Write the keys and values of one batch, then attend from the queries of another."""
    place = ops.place(written[0])
    device = place.token_ids.device
    ops.write_kv(written[1].to(device), kv, place.slots, HEADS)
    place = ops.place(asked[0])
    return ops.attention(asked[1].to(device), kv, place, HEADS, scale=HEADS.head_dim**-0.5, window=window)


def _batch(*, new_only: bool) -> Batch:
    """The sequences' new tokens, or all of them as if they were new."""
    counts = [new if new_only else length for length, new, _ in SEQUENCES]
    positions = [list(range(length - count, length)) for (length, *_), count in zip(SEQUENCES, counts, strict=True)]
    slots = [
        blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for (_, _, blocks), each in zip(SEQUENCES, positions, strict=True)
        for position in each
    ]
    widest = max(len(blocks) for *_, blocks in SEQUENCES)
    tables = [[*blocks, *[0] * (widest - len(blocks))] for *_, blocks in SEQUENCES]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Batch(
        token_ids=torch.zeros(sum(counts), dtype=torch.int64),
        positions=torch.tensor(list(chain(*positions)), dtype=torch.int32),
        query_starts=starts,
        context_lens=torch.tensor([length for length, *_ in SEQUENCES], dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int64),
        logit_rows=torch.zeros(0, dtype=torch.int64),
    )


def _new_rows() -> list[int]:
    """Which rows of the whole batch are the new tokens."""
    rows: list[int] = []
    first = 0
    for length, new, _ in SEQUENCES:
        rows += range(first + length - new, first + length)
        first += length
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; 1 if one differs from what is expected or the device cannot be opened."""
    parser = argparse.ArgumentParser(prog="xllm selftest")
    parser.add_argument("--device", required=True)
    arguments = parser.parse_args(argv)
    differs = False
    with alone_on_stdout() as out:
        try:
            for finding in examine(open_device(arguments.device, Config())):
                print(msgspec.json.encode(finding).decode(), file=out, flush=True)
                differs |= finding.differs
        except XllmError as error:
            differs = True
            print(msgspec.json.encode(Finding(name="device", value=str(error), differs=True)).decode(), file=out)
    return int(differs)


@contextmanager
def alone_on_stdout() -> Iterator[TextIO]:
    """The real stdout; what vendors' libraries print meanwhile goes to stderr."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(own), "w") as out:
            yield out
    finally:
        os.dup2(own, 1)
        os.close(own)


if __name__ == "__main__":
    sys.exit(main())
