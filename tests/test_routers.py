"""Two replicas behind the routers people put in front: a tenant's prefix stays on one of them, and one may go.

The replicas are asked through their metrics who served what; the routers are `vllm-router` and `sglang-router` as
`make clients` installs them, set to notice a dead replica quickly.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from checkpoints import tiny_checkpoint
from client_programs import client_environment
from real_server import Serving
from stream_grammar import check_stream

pytestmark = [pytest.mark.clients, pytest.mark.server, pytest.mark.slow]
COMMANDS = {"sglang": ("sglang-router", "launch"), "vllm": ("vllm-router",)}
WATCHFUL = (
    "--policy=cache_aware", "--health-check-interval-secs=1", "--health-failure-threshold=1", "--cb-failure-threshold=2"
)  # fmt: skip
FLAGS = ("--model_id=tiny", "--enable_vmm_kvcache=true", "--vmm_elastic=true", "--max_cache_size=64MiB")
TENANTS = ("the first tenant's rules: " + "abc " * 50, "another tenant, other rules: " + "xyz " * 50)
NUM_REQUESTS = 24


def start_replica(folder: Path) -> Serving:
    folder.mkdir()
    return Serving(
        folder, tiny_checkpoint("llama"), *FLAGS, "--block_size=16", "--shutdown_drain_secs=2"
    )  # until the routers noticed


@pytest.fixture
def replicas(clients: Path, tmp_path: Path) -> Iterator[list[Serving]]:
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(start_replica, (tmp_path / "a", tmp_path / "b")))
    yield made
    left = [replica for replica in made if replica.process.poll() is None]
    for replica in made:
        replica.http.close()
    for replica in left:
        replica.process.terminate()
    assert [replica.process.wait(30) for replica in left] == [0] * len(left)


@contextmanager
def routed(kind: str, clients: Path, folder: Path, replicas: list[Serving]) -> Iterator[httpx.Client]:
    """A client of a router before these replicas."""
    ports = free_ports(2)
    name, *words = COMMANDS[kind]
    command = [clients / name, *words, "--host=127.0.0.1", f"--port={ports[0]}", f"--prometheus-port={ports[1]}"]
    command += ["--worker-urls", *(replica.url for replica in replicas), *WATCHFUL]
    log = folder / "router.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=client_environment(folder))
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=30) as http:
            wait_until_routing(http, process, log)
            yield http
    finally:
        process.terminate()
        process.wait(20)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [taken.getsockname()[1] for taken in sockets]
    for taken in sockets:
        taken.close()
    return ports


def wait_until_routing(http: httpx.Client, process: subprocess.Popen[bytes], log: Path, seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if ask(http, "ready?", max_tokens=1).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def ask(http: httpx.Client, prompt: str, **fields: object) -> httpx.Response:
    return http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "ignore_eos": True, **fields})


def served(replicas: list[Serving]) -> list[tuple[float, float]]:
    """Requests and tokens found in the prefix cache, for each replica."""
    names = ("vllm:request_success_total", "vllm:prefix_cache_hits_total")
    return [(replica.metric(names[0]), replica.metric(names[1])) for replica in replicas]


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_prefix_stays_on_one_replica(kind: str, clients: Path, replicas: list[Serving], tmp_path: Path):
    homes = []
    with routed(kind, clients, tmp_path, replicas) as http, ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, http, TENANTS[0], max_tokens=250)  # keeps its replica busy while the second comes
        replicas_busy(replicas)
        assert ask(http, TENANTS[1], max_tokens=1).status_code == first.result().status_code == 200
        for tenant in TENANTS:
            before = served(replicas)
            answers = pool.map(lambda i, tenant=tenant: ask(http, f"{tenant} {i}", max_tokens=2), range(NUM_REQUESTS))
            assert {answer.status_code for answer in answers} == {200}
            requests, hits = zip(
                *(map(float.__sub__, *pair) for pair in zip(served(replicas), before, strict=True)), strict=True
            )
            assert sum(requests) == NUM_REQUESTS and max(requests) >= 0.9 * NUM_REQUESTS, (requests, hits)
            homes.append(requests.index(max(requests)))
            assert hits[homes[-1]] >= 0.9 * NUM_REQUESTS * 208, (requests, hits)  # 13 blocks of each tenant's prefix
    assert sorted(homes) == [0, 1], "each tenant has a replica"


def replicas_busy(replicas: list[Serving], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not any(replica.metric("vllm:num_requests_running") for replica in replicas):
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Load:
    """Both tenants ask, four requests at a time and 600 at most, until `close`. Every answer must be whole.

    Streams are asked for where a replica drains: what a killed one has begun to stream no router can mend."""

    def __init__(self, http: httpx.Client, *, streams: bool) -> None:
        self._http, self._streams, self._is_enough = http, streams, False
        self.num_answers = 0
        self._pool = ThreadPoolExecutor(4)
        self._workers = [self._pool.submit(self._ask_on, TENANTS[i % 2]) for i in range(4)]

    def _ask_on(self, tenant: str) -> None:
        for i in range(150):
            answer = ask(self._http, f"{tenant} {i}", max_tokens=60, stream=self._streams)
            assert answer.status_code == 200, answer.text
            if self._streams:
                assert check_stream(answer.text, chat=False).error is None, answer.text
            else:
                assert answer.json()["usage"]["completion_tokens"] == 60
            self.num_answers += 1
            if self._is_enough:
                return

    def wait_for(self, more: int, seconds: float = 30) -> None:
        goal, deadline = self.num_answers + more, time.monotonic() + seconds
        while self.num_answers < goal and not any(worker.done() for worker in self._workers):
            assert time.monotonic() < deadline, "requests hang"
            time.sleep(0.01)

    def close(self) -> None:
        self._is_enough = True
        for worker in self._workers:
            worker.result(30)
        self._pool.shutdown()


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("how", ["kill", "drain"])
def test_no_request_fails_when_a_replica_goes(
    kind: str, how: str, clients: Path, replicas: list[Serving], tmp_path: Path
):
    with routed(kind, clients, tmp_path, replicas) as http:
        load = Load(http, streams=how == "drain")
        load.wait_for(12)
        victim = max(replicas, key=lambda replica: replica.metric("vllm:num_requests_running"))
        victim.kill() if how == "kill" else victim.process.send_signal(signal.SIGTERM)
        assert victim.process.wait(30) == (-signal.SIGKILL if how == "kill" else 0)
        load.wait_for(24)
        load.close()
