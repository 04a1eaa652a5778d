"""`xllm bench serve`: its arithmetic, its client against a real API process, and what it says when a server fails."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from scripted_server import Server as ScriptedServer
from scripted_server import serving, write_model

from xllm_cli.bench import serve
from xllm_cli.bench.load import Address, LoadError, LoadResult, Workload, run_load
from xllm_cli.bench.serve import Run, main, parse_counts, parse_url, table
from xllm_cli.bench.servers import Server, ServerFailed, counters, is_ready
from xllm_cli.errors import ConfigError

NOBODY = Address("127.0.0.1", 9)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder = tmp_path_factory.mktemp("bench")
    with serving(folder, write_model(folder / "model")) as server:
        yield server.wait_ready()


@pytest.mark.server
def test_a_load_counts_what_the_server_generated(running: ScriptedServer) -> None:
    address = parse_url(running.url)
    before = counters(address)["generated"]
    result = run_load(address, Workload(concurrency=3, requests=7, prompt_tokens=9, output_tokens=5), seed=1)
    assert result.tokens == 7 * 5 == counters(address)["generated"] - before
    assert 0 < result.first < result.seconds
    assert 0 <= result.between < result.seconds


@pytest.mark.server
def test_a_refused_request_spoils_the_run(running: ScriptedServer) -> None:
    too_long = Workload(concurrency=1, requests=1, prompt_tokens=4096, output_tokens=5)
    with pytest.raises(LoadError, match="400"):
        run_load(parse_url(running.url), too_long, seed=1)


@pytest.mark.server
def test_the_command_measures_a_running_server(
    running: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--concurrency=1,2", "--prompt_tokens=8", "--output_tokens=4", "--repeats=2"]
    main(["serve", f"--url={running.url}", f"--json_file={tmp_path / 'out.json'}", *sizes])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["1", "server"], ["2", "server"]]
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [(run["concurrency"], run["tokens"], run["generated"]) for run in runs] == [(1, 16, 16)] * 2 + [
        (2, 24, 24)
    ] * 2


def test_nobody_listening_is_a_clean_error() -> None:
    assert not is_ready(NOBODY)
    with pytest.raises(LoadError, match="ConnectionRefusedError"):
        run_load(NOBODY, Workload(1, 1, 1, 2), seed=0)


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    server = Server(["--model=/nonexistent", "--block_size=0"], log=tmp_path / "log")
    with pytest.raises(ServerFailed, match=r"ended with 2:\n(.|\n)*block_size"), server:
        pass


def test_sigterm_unwinds_what_was_started() -> None:
    before = signal.getsignal(signal.SIGTERM)
    closed: list[str] = []
    with pytest.raises(SystemExit) as stopped, serve.unwinding_on_sigterm(), ExitStack() as stack:
        stack.callback(closed.append, "server")
        signal.raise_signal(signal.SIGTERM)
    assert (stopped.value.code, closed) == (143, ["server"])
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_table_gives_medians_and_ratios() -> None:
    def runs(*speeds: int) -> list[Run]:
        counts = {"pages_mapped": 7, "pages_unmapped": 5, "map_seconds": 0.04}
        return [Run(LoadResult(1.0, speed, 0.1, 0.02), counts, 3 * 2**20, 2**20) for speed in speeds]

    lines = list(table({("physical", 8): runs(100, 120, 90), ("elastic", 8): runs(95, 50, 99)}, baseline="physical"))
    assert lines[1].split() == [
        "8",
        "physical",
        "100.0",
        "90.0-120.0",
        "1.000",
        "100.0",
        "20.00",
        "+7",
        "-5",
        "40",
        "3",
        "1",
    ]
    assert lines[2].split() == [
        "8",
        "elastic",
        "95.0",
        "50.0-99.0",
        "0.950",
        "100.0",
        "20.00",
        "+7",
        "-5",
        "40",
        "3",
        "1",
    ]
    assert {len(line) for line in lines} == {len(lines[0])}


def test_another_server_is_first_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    result = LoadResult(1.0, 1, 0.1, 0.1)
    monkeypatch.setattr(serve, "run_load", lambda address, workload, *, seed: order.append(address.host) or result)
    monkeypatch.setattr(serve, "counters", lambda address: {})
    monkeypatch.setattr(serve, "memory", lambda address: {"physical": 0})
    monkeypatch.setattr(serve, "REST_SECONDS", 0.0)
    loads = [Workload(count, 1, 1, 2) for count in (1, 2, 3)]
    serve.measure({name: Address(name, 1) for name in "abc"}, loads, repeats=3)
    order = order[3:]  # those only warmed up
    assert all(sorted(order[3 * load :: 9]) == list("abc") for load in range(3)), "each is first once, for each load"


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1,-2", "many"])
def test_bad_counts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="positive numbers"):
        parse_counts(text)


def test_urls_need_a_scheme_and_a_host() -> None:
    assert parse_url("http://[::1]:8010/") == ("::1", 8010)
    assert parse_url("http://[::1]:8010/").authority == "[::1]:8010"
    assert parse_url("http://localhost") == ("localhost", 80)
    with pytest.raises(ConfigError, match="must look like"):
        parse_url("localhost:8010")


def test_variants_differ_in_the_vmm_switches_only() -> None:
    names = {flag.partition("=")[0] for flags in serve.VARIANTS.values() for flag in flags}
    assert names == {"--enable_vmm_kvcache", "--vmm_elastic"}
