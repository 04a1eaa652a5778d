"""Limits and trims of a running server, and several servers on one device: real processes, real memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from memory_cgroup import memory_cgroup
from real_server import Serving

from xllm_cli.bench.memory_group import MemoryGroup
from xllm_cli.bench.wide_model import BYTES_PER_TOKEN, make_wide_model
from xllm_cli.neighbours.folder import device_folder
from xllm_cli.neighbours.status import read_statuses

MIB = 1 << 20
ELASTIC = ("--enable_vmm_kvcache=true", "--vmm_elastic=true", "--block_size=16")


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide_model(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def server(wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("limits")
    serving = Serving(folder, wide_model, *ELASTIC, f"--vmm_neighbours_dir={folder}")
    yield serving
    assert serving.stop() == 0, serving.log.read_text()


def prompt(tokens: int, first: int = 1) -> list[int]:
    return [first + place % 97 for place in range(tokens)]


def fill(server: Serving, nbytes: int, first: int = 1) -> None:
    """Leave about so many bytes of cached prefixes behind."""
    server.complete(prompt=prompt(nbytes // BYTES_PER_TOKEN, first), max_tokens=1)


# --- one server


def test_a_lower_limit_takes_cached_blocks_of_an_idle_server(server: Serving) -> None:
    fill(server, 40 * MIB)
    assert server.vmm()["kv_cached"] >= 30 * MIB
    answer = server.http.post("/vmm/limit", json={"bytes": 8 * MIB}).json()
    assert answer["limit"] == 8 * MIB >= answer["mapped"]
    assert answer["freed"] >= 20 * MIB
    assert server.memfd_bytes() <= 8 * MIB
    line = f"KV cache by order: {answer['freed']} bytes given back, {answer['mapped']} mapped, limit {8 * MIB}"
    assert line in server.log.read_text()
    assert server.http.post("/vmm/limit", json={"bytes": 0}).json()["limit"] is None


def test_a_request_beyond_the_limit_waits_until_it_is_lifted(server: Serving) -> None:
    server.http.post("/vmm/limit", json={"bytes": 4 * MIB})
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, prompt=prompt(16 * MIB // BYTES_PER_TOKEN, 40), max_tokens=1)
        assert server.wait_until(lambda vmm: vmm["headroom_limited_by"] == "limit")["limit"] == 4 * MIB
        deadline = time.monotonic() + 10
        while not server.metric("vllm:num_requests_waiting") and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not answer.done()
        server.http.post("/vmm/limit", json={"bytes": 0})
        assert answer.result(30)["usage"]["completion_tokens"] == 1


def test_running_requests_give_way_to_a_limit_and_end_all_the_same(server: Serving) -> None:
    tokens = 24 * MIB // BYTES_PER_TOKEN
    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(server.complete, prompt=prompt(tokens, 50 + n), max_tokens=80, ignore_eos=True)
            for n in range(3)
        ]
        server.wait_until(lambda vmm: vmm["kv_live"] >= 70 * MIB)
        answer = server.http.post("/vmm/limit", json={"bytes": 40 * MIB}).json()
        assert answer["mapped"] <= 40 * MIB
        assert [one.result(60)["usage"]["completion_tokens"] for one in asked] == [80, 80, 80]
    server.http.post("/vmm/limit", json={"bytes": 0})


def test_a_trim_gives_back_what_it_says(server: Serving) -> None:
    fill(server, 40 * MIB, 20)
    before = server.vmm()["physical"]
    some = server.http.post("/vmm/trim", json={"bytes": 10 * MIB}).json()
    assert 10 * MIB <= some["freed"] <= 14 * MIB and some["physical"] == before - some["freed"]
    everything = server.http.post("/vmm/trim").json()
    assert everything["mapped"] == 0 and server.memfd_bytes() == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("limit", {}), ("limit", {"bytes": -1}), ("limit", {"bytes": "1"}), ("limit", {"bytes": 1.5}),
        ("limit", {"bytes": 1, "byte": 2}), ("limit", {"bytes": 1 << 63}), ("trim", {"bytes": -1}),
        ("trim", {"all": 1}),
    ],
)  # fmt: skip
def test_a_wrong_body_changes_nothing(server: Serving, path: str, body: dict) -> None:
    answer = server.http.post(f"/vmm/{path}", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_value"
    assert server.vmm()["limit"] is None


def test_the_status_file_follows_the_limit(server: Serving) -> None:
    server.http.post("/vmm/limit", json={"bytes": 12 * MIB})
    (status,) = read_statuses(device_folder("cpu", server.log.parent))
    assert status.limit == 12 * MIB and status.model_id == "wide0"
    server.http.post("/vmm/limit", json={"bytes": 0})


def xllm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xllm_cli.cli", *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_command_shows_limits_and_trims(server: Serving) -> None:
    server.http.post("/vmm/trim", json={})
    fill(server, 20 * MIB, 70)
    shown = xllm("vmm", "show", "--dir", str(server.log.parent))
    assert "wide0" in shown.stdout and "20.0MiB" in shown.stdout, shown
    done = xllm("vmm", "limit", "8MiB", "--url", server.url)
    assert done.returncode == 0 and "limit 8.0MiB" in done.stdout, done
    assert "no limit" in xllm("vmm", "limit", "0", "--url", server.url).stdout
    done = xllm("vmm", "trim", "--url", server.url)
    assert "0.0MiB mapped, 0.0MiB physical" in done.stdout, done
    (line,) = xllm("vmm", "show", "--json", "--dir", str(server.log.parent)).stdout.splitlines()
    status = json.loads(line)
    assert status["pid"] in [child.pid for child in psutil.Process(server.process.pid).children()]
    assert (status["physical"], status["limit"], status["waiting"]) == (0, None, 0)


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (("limit", "8X"), 2, "8X"), (("limit", "-1"), 2, "-1"), (("limit",), 2, "BYTES"),
        (("limit", "1G", "--url", "http://127.0.0.1:9"), 1, "cannot be reached"),
        (("trim", "1G", "--url", "ftp://x"), 2, "no address of a server"), (("shrink",), 2, "shrink"),
    ],
)  # fmt: skip
def test_the_command_says_what_is_wrong(words: tuple[str, ...], status: int, text: str) -> None:
    done = xllm("vmm", *words)
    assert done.returncode == status and text in done.stderr, done


# --- several


class Pair(NamedTuple):
    """Two servers on one budget."""

    rich: Serving
    poor: Serving
    folder: Path
    group: MemoryGroup

    def given(self) -> int:
        return self.rich.vmm()["neighbours"]["given"]

    def received(self) -> int:
        return self.poor.vmm()["neighbours"]["received"]

    def leave(self, nbytes: int) -> None:
        """Limit the group so that poor may map about so much more, whatever processes and files need here."""
        for _ in range(20):  # files that the kernel drops under the new limit are free memory, too
            seen = self.poor.vmm()
            self.group.limit(seen["total"] - seen["headroom"] + nbytes)
            if self.poor.wait_until(lambda vmm: vmm["headroom"] <= nbytes + 16 * MIB, 3)["headroom"] <= 2 * nbytes:
                return
        pytest.fail(f"{seen}: this group cannot be made tight")


@pytest.fixture(scope="module")
def pair(wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    flags = (*ELASTIC, f"--vmm_neighbours_dir={folder}")
    places = [folder / name for name in ("rich", "poor")]
    with memory_cgroup(4096 * MIB) as group, ThreadPoolExecutor(2) as pool:
        for place in places:
            place.mkdir()
        starts = [pool.submit(Serving, place, wide_model, *flags, within=group.command) for place in places]
        servers = [start.result() for start in starts]
        yield Pair(servers[0], servers[1], folder, group)
        for server in servers:
            if server.process.poll() is None:
                assert server.stop() == 0, server.log.read_text()


def test_a_starving_server_gets_what_an_idle_one_only_remembers(pair: Pair) -> None:
    """Rich remembers twice what poor needs, and hardly anything is free. Poor has run such a prompt before: what a step
    takes besides KV is known, and gone from the free memory, when the group is limited."""
    needed = 160 * MIB
    fill(pair.poor, needed, 50)
    for number in range(10):
        fill(pair.rich, 32 * MIB, 1 + number)
    pair.poor.http.post("/vmm/trim")
    pair.leave(16 * MIB)
    started = time.monotonic()
    fill(pair.poor, needed)
    assert time.monotonic() - started < 50, "it waited for nothing but an answer: memory_wait_seconds is 60"
    deadline = time.monotonic() + 20  # the last answer may come after the memory
    while (given := pair.given()) != (received := pair.received()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert given == received > 0, (pair.rich.vmm(), pair.poor.vmm())


def test_a_neighbour_killed_leaves_its_memory_to_the_other(pair: Pair) -> None:
    pair.poor.http.post("/vmm/trim")
    for number in range(10):
        fill(pair.rich, 32 * MIB, 1 + number)
    pair.leave(16 * MIB)
    received = pair.received()
    pair.rich.kill()
    fill(pair.poor, 160 * MIB)
    assert len(read_statuses(device_folder("cpu", pair.folder))) == 1
    assert pair.received() == received
