"""`xllm bench serve`: elastic, fixed and physical KV cache side by side, or one running server.

The servers stand ready together and take turns, workload by workload, repeat by repeat, each time another one first, so
that whatever else the machine does falls on all of them alike; the table shows medians, those of the ratios to the
physical cache in the same turn among them. An elastic cache starts each run from nothing, and making a page costs what
the system takes for it: on a virtual machine that hands freed memory back to its host, 5 ms and more instead of 0.2.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click

from xllm_cli.bench import models, neighbours, sleep
from xllm_cli.bench.load import Address, LoadResult, Workload, run_load
from xllm_cli.bench.rows import HEADING, line
from xllm_cli.bench.rows import as_json as rows_as_json
from xllm_cli.bench.servers import Server, counters, memory, unwinding_on_sigterm
from xllm_cli.errors import ConfigError
from xllm_cli.fetch import fetch

VARIANTS = {
    "physical": ["--enable_vmm_kvcache=false"],
    "fixed": ["--enable_vmm_kvcache=true", "--vmm_elastic=false"],
    "elastic": ["--enable_vmm_kvcache=true", "--vmm_elastic=true"],
}
BASELINE = "physical"
REST_SECONDS = 1.2  # spares leave within a second
DEFAULT_MODEL = "smollm2-135m-instruct"


class Run(NamedTuple):
    """One workload on one server: what the client saw, what the server counted, and the bytes it owns at the end of it
    and after a rest."""

    load: LoadResult
    counts: dict[str, float]
    physical: int
    rested: int


Runs = dict[tuple[str, int], list[Run]]


@click.group()
def group() -> None:
    """Measurements; each says what it compares."""


group.add_command(neighbours.command)
group.add_command(sleep.command)
group.add_command(models.command)


@group.command("serve", context_settings={"ignore_unknown_options": True})
@click.option("--url", help="benchmark this running server instead of starting three", metavar="URL")
@click.option("--model", help=f"checkpoint folder; unset fetches {DEFAULT_MODEL}", type=click.Path(exists=True))
@click.option("--concurrency", default="1,8,32", show_default=True, help="requests at a time, one workload for each")
@click.option("--prompt_tokens", default=128, show_default=True, type=click.IntRange(1))
@click.option("--output_tokens", default=64, show_default=True, type=click.IntRange(2))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="requests after each other")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--max_cache_size", default="1GiB", show_default=True, help="KV bytes of each server that is started")
@click.option(
    "--json_file", help="write every single measurement there", type=click.Path(dir_okay=False, path_type=Path)
)
@click.argument("server_flags", nargs=-1, type=click.UNPROCESSED)
def serve(  # noqa: PLR0913  click passes one argument per option
    *,
    url: str | None,
    model: str | None,
    concurrency: str,
    prompt_tokens: int,
    output_tokens: int,
    rounds: int,
    repeats: int,
    max_cache_size: str,
    json_file: Path | None,
    server_flags: tuple[str, ...],
) -> None:
    """Tokens per second, time to the first token and between tokens, start-up time. Further flags go to the servers."""
    workloads = [
        Workload(count, max(4, rounds * count), prompt_tokens, output_tokens) for count in parse_counts(concurrency)
    ]
    with unwinding_on_sigterm(), contextlib.ExitStack() as stack:
        if url:
            addresses, starts = {"server": parse_url(url)}, {}
        else:
            flags = [f"--model={model or fetch(DEFAULT_MODEL)}", f"--max_cache_size={max_cache_size}", *server_flags]
            servers = dict(start_servers(flags, stack))
            addresses = {name: server.address for name, server in servers.items()}
            starts = {name: server.start_seconds for name, server in servers.items()}
        runs = measure(addresses, workloads, repeats=repeats)
    if starts:
        click.echo("ready after  " + "  ".join(f"{name} {seconds:.1f} s" for name, seconds in starts.items()))
    for text in table(runs, baseline=BASELINE):
        click.echo(text)
    if json_file:
        json_file.write_text(json.dumps(as_json(runs, starts), indent=1) + "\n", encoding="utf-8")


@group.command("vmm")
@click.option("--quick", is_flag=True, help="few repeats: does it work, not how fast")
@click.option("--json", "as_json_text", is_flag=True, help="print JSON instead of a table")
@click.argument("cases", nargs=-1)
def vmm(*, quick: bool, as_json_text: bool, cases: tuple[str, ...]) -> None:
    """Pages, blocks and limits of the virtual KV cache against the floors of this machine. CASES: only these."""
    from xllm_cli.bench.vmm import measure as measure_vmm

    rows = []
    if not as_json_text:
        click.echo(HEADING)
    for row in measure_vmm(cases, quick=quick):
        rows.append(row)
        if not as_json_text:
            click.echo(line(row))
    if as_json_text:
        click.echo(rows_as_json(rows))


def main(arguments: list[str]) -> int:
    """`xllm bench …` with the words after `bench`. Raises XllmError and click's usage errors."""
    code = group.main(arguments, prog_name="xllm bench", standalone_mode=False)
    return code if isinstance(code, int) else 0


def parse_counts(text: str) -> list[int]:
    """`1,8,32` → [1, 8, 32]. Raises ConfigError on anything but positive numbers."""
    counts = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(counts) != len(text.split(",")) or 0 in counts:
        raise ConfigError(f"--concurrency={text}: must be positive numbers with commas between, as in 1,8,32")
    return counts


def parse_url(url: str) -> Address:
    """`http://host:port` → its address; a missing port is 80. Raises ConfigError on any other scheme."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"--url={url}: must look like http://127.0.0.1:8010")
    return Address(parts.hostname, parts.port or 80)


def start_servers(flags: list[str], stack: contextlib.ExitStack) -> Iterator[tuple[str, Server]]:
    """One ready server per variant, started one after the other; `stack` stops them."""
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xllm-bench-")))
    for name, variant in VARIANTS.items():
        click.echo(f"starting {name}", err=True)
        yield name, stack.enter_context(Server([*flags, *variant], log=logs / f"{name}.log"))


def measure(addresses: Mapping[str, Address], workloads: list[Workload], *, repeats: int) -> Runs:
    """Every workload on every server in turn, `repeats` times after one run that only warms up."""
    runs: Runs = {}
    for address in addresses.values():
        run_load(address, workloads[0]._replace(requests=workloads[0].concurrency), seed=0)
    turns = list(addresses.items())
    for repeat in range(1, repeats + 1):
        turns = turns[1:] + turns[:1]
        for workload in workloads:
            for name, address in turns:
                before = counters(address)
                load = run_load(address, workload, seed=repeat * 1000 + workload.concurrency)
                after = counters(address)
                counts = {key: after[key] - before[key] for key in after}
                physical = int(memory(address)["physical"])
                time.sleep(REST_SECONDS)
                run = Run(load, counts, physical, int(memory(address)["physical"]))
                runs.setdefault((name, workload.concurrency), []).append(run)
                click.echo(f"{repeat}/{repeats} {name} x{workload.concurrency}: {load.tokens_per_second:.1f}", err=True)
    return runs


def table(runs: Runs, *, baseline: str) -> Iterator[str]:
    """The lines to print: medians over repeats, ranges of tokens/s, and the median of the ratios to `baseline`.

    `pages` were mapped and unmapped inside the window, which took `map ms`; `KV MiB` is owned at its end, `rest` a
    second later.
    """
    yield "requests  KV cache   tok/s         range  ratio  TTFT ms  TPOT ms        pages  map ms  KV MiB    rest"
    for (name, concurrency), repeats in sorted(runs.items(), key=lambda item: item[0][1]):
        speeds = [run.load.tokens_per_second for run in repeats]
        base = [run.load.tokens_per_second for run in runs.get((baseline, concurrency), repeats)]
        ratio = _median(speed / other for speed, other in zip(speeds, base, strict=True))
        mapped, unmapped, seconds = (
            _median(run.counts[key] for run in repeats) for key in ("pages_mapped", "pages_unmapped", "map_seconds")
        )
        yield (
            f"{concurrency:>8}  {name:<8} {_median(speeds):>7.1f} {min(speeds):>6.1f}-{max(speeds):<6.1f} "
            f"{ratio:>6.3f} {1000 * _median(run.load.first for run in repeats):>8.1f} "
            f"{1000 * _median(run.load.between for run in repeats):>8.2f} {f'+{mapped:.0f} -{unmapped:.0f}':>12} "
            f"{1000 * seconds:>7.0f} {_median(run.physical for run in repeats) / 2**20:>7.0f} "
            f"{_median(run.rested for run in repeats) / 2**20:>7.0f}"
        )


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def as_json(runs: Runs, starts: Mapping[str, float]) -> dict[str, Any]:
    """Everything measured, one entry per run."""
    entries = [
        {
            "server": name,
            "concurrency": concurrency,
            "tokens_per_second": run.load.tokens_per_second,
            **run.load._asdict(),
            **run.counts,
            "physical": run.physical,
            "rested": run.rested,
        }
        for (name, concurrency), repeats in runs.items()
        for run in repeats
    ]
    return {"start_seconds": dict(starts), "runs": entries}
