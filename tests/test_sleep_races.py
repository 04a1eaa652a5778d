"""Sleep and wake-up over HTTP while others ask, cancel, sleep and starve: nothing hangs, and nothing is wrong after."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from memory_cgroup import memory_cgroup
from real_server import Serving
from test_sleep_server import KINDS, MIB, greedy, post, refused, serve

from xllm_cli.bench import wide_model
from xllm_cli.bench.memory_group import MemoryGroup
from xllm_cli.bench.wide_model import BYTES_PER_TOKEN, make_wide_model

GROUP = 1500 * MIB
ROOM = 64 * MIB  # what the poor one of two servers may map
LONG = {"prompt": [5] * 30, "max_tokens": 450, "ignore_eos": True, "temperature": 0}
ORDERS = (
    "/sleep?level=1", "/sleep?level=2", "/sleep?park=true", "/sleep?mode=wait", "/sleep?mode=abort", "/wakeup",
    "/wakeup", "/wake_up?tags=weights", "/vmm/trim",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    serving = serve(tmp_path_factory.mktemp("races"), *KINDS["elastic"])
    yield serving
    assert serving.stop() == 0, serving.log.read_text()


def wait_until_running(server: Serving) -> None:
    deadline = time.monotonic() + 20
    while not server.metric("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.005)


def test_open_requests_refuse_hold_up_or_lose_against_a_sleep(server: Serving) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.http.post, "/v1/completions", json=LONG)
        wait_until_running(server)
        busy = server.http.post("/sleep")
        assert refused(busy) == (409, "model_busy") and "1 requests" in busy.json()["error"]["message"]
        asleep = pool.submit(server.http.post, "/sleep", json={"mode": "wait"})
        assert first.result(60).json()["usage"]["completion_tokens"] == 450
        assert asleep.result(60).json()["after"] == "light"
        post(server, "/wakeup")
        second = pool.submit(server.http.post, "/v1/completions", json=LONG)
        wait_until_running(server)
        assert post(server, "/sleep", mode="abort", master_status=2)["after"] == "deep"
        assert refused(second.result(60)) == (503, "model_sleeping")
        post(server, "/wakeup")


def test_while_it_waits_it_says_so_and_takes_nothing_new(server: Serving) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.http.post, "/v1/completions", json=LONG)
        wait_until_running(server)
        asleep = pool.submit(server.http.post, "/sleep", json={"mode": "wait"})
        deadline = time.monotonic() + 20
        while (state := server.http.get("/is_sleeping").json()["state"]) == "awake" and time.monotonic() < deadline:
            time.sleep(0.002)
        late = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert state in ("falling asleep", "light") and refused(late) == (503, "model_sleeping")
        assert (running.result(60).status_code, asleep.result(60).status_code) == (200, 200)
    post(server, "/wakeup")


def test_a_client_that_goes_away_changes_nothing(server: Serving) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.http.post, "/v1/completions", json=LONG)
        wait_until_running(server)
        with suppress(httpx.ReadTimeout):  # or its answer comes before it goes: no matter
            httpx.post(f"{server.url}/sleep", json={"mode": "wait"}, timeout=0.05)
        assert running.result(60).json()["usage"]["completion_tokens"] == 450
    server.wait_until(lambda vmm: vmm["models"]["llama"]["state"] == "light")
    assert post(server, "/wakeup")["before"] == "light"


def test_sleep_raced_with_requests_cancels_and_other_sleeps(server: Serving) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    expected = greedy(server)

    def client(number: int) -> Counter[tuple[int, str]]:
        numbers, seen = random.Random(seed + number), Counter[tuple[int, str]]()
        for _ in range(25):
            action = numbers.random()
            if action < 0.4:
                answer = server.http.post(numbers.choice(ORDERS))
            elif action < 0.6:
                cancel(server, numbers.random() * 0.05)
                continue
            else:
                answer = server.http.post("/v1/completions", json={**LONG, "max_tokens": numbers.randrange(1, 20)})
            seen[(answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"])] += 1
        return seen

    with ThreadPoolExecutor(6) as pool:
        seen = sum(pool.map(client, range(6), timeout=120), Counter[tuple[int, str]]())
    allowed = {"model_busy", "already_asleep", "already_awake", "falling_asleep"}
    assert all(
        code in allowed if status == 409 else status == 200 or code == "model_sleeping" for status, code in seen
    ), seen
    server.wait_until(lambda vmm: vmm["models"]["llama"]["state"] != "falling asleep")
    if server.http.get("/is_sleeping").json()["is_sleeping"]:
        post(server, "/wakeup")
    assert greedy(server) == expected
    memory = server.vmm()
    assert (memory["kv_live"], memory["parked"], memory["ranks"][0]["unaccounted"]) == (0, 0, 0)


def cancel(server: Serving, seconds: float) -> None:
    """A stream whose client leaves after so long."""
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=1) as answer:
            if answer.status_code == 200:
                lines = answer.iter_lines()  # kept: it hangs up when it goes
                next(lines, None)
                time.sleep(seconds)
    except httpx.HTTPError:
        pass  # that it is gone is the point


def test_a_server_that_ends_while_a_sleep_waits_does_not_wait_for_it(tmp_path: Path) -> None:
    server = serve(tmp_path, *KINDS["elastic"], "--shutdown_timeout_secs=1", "--shutdown_drain_secs=0")
    with ThreadPoolExecutor(2) as pool:
        pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=60)
        wait_until_running(server)
        asleep = pool.submit(httpx.post, f"{server.url}/sleep?mode=wait", timeout=60)
        time.sleep(0.1)
        started = time.monotonic()
        assert server.stop() == 0 and time.monotonic() - started < 30
        assert asleep.result(10).status_code in (200, 503)


# --- several on one budget


class Pair(NamedTuple):
    """A server that sleeps and one that has hardly any memory left."""

    sleeper: Serving
    poor: Serving
    group: MemoryGroup


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    models = {"poor": make_wide_model(tmp_path / "wide")}
    monkeypatch.setattr(wide_model, "NETWORK", 1 << 17)
    models["sleeper"] = make_wide_model(tmp_path / "heavy")
    flags = ("--enable_vmm_kvcache=true", "--vmm_elastic=true", "--block_size=16", f"--vmm_neighbours_dir={tmp_path}")
    extra = {"poor": (), "sleeper": ("--enable_vmm_weights=true", "--dtype=float32")}
    with memory_cgroup(GROUP) as group, ExitStack() as stack:
        servers = {}
        for name in models:
            (tmp_path / name).mkdir()
            serving = Serving(tmp_path / name, models[name], *flags, *extra[name], within=group.command)
            stack.callback(serving.kill)
            servers[name] = serving
        warm_up(servers["poor"])
        group.limit(GROUP - servers["poor"].vmm()["headroom"] + ROOM)
        servers["poor"].wait_until(lambda vmm: vmm["headroom"] <= 2 * ROOM)
        yield Pair(**servers, group=group)


def warm_up(server: Serving) -> None:
    """Let it see what a long prompt needs beside the cache."""
    server.complete(prompt=[9] * (2 * ROOM // BYTES_PER_TOKEN), max_tokens=1)
    post(server, "/vmm/trim")


def test_a_neighbour_that_starves_gets_parked_pages_and_the_sleeper_none(pair: Pair) -> None:
    sleeper, poor, group = pair
    expected = sleeper.complete(prompt=[1, 2, 3], max_tokens=5)["choices"][0]["text"]
    parked = post(sleeper, "/sleep", park=True)["physical"]
    assert parked == sleeper.memfd_bytes() > 190 * MIB
    wanted = poor.vmm()["headroom"] + parked // 2
    started = time.monotonic()
    poor.complete(prompt=[1 + place % 97 for place in range(wanted // BYTES_PER_TOKEN)], max_tokens=1)
    assert time.monotonic() - started < 50, "it waited for nothing but an answer: memory_wait_seconds is 60"
    memory = sleeper.vmm()
    assert (memory["physical"], memory["parked"], sleeper.memfd_bytes()) == (0, 0, 0)
    assert memory["neighbours"]["given"] > 0 and memory["models"]["heavy"]["state"] == "light"
    short = sleeper.http.post("/wakeup")
    assert refused(short) == (503, "weights_memory_unavailable") and "free" in short.json()["error"]["message"]
    assert short.headers["retry-after"] and sleeper.http.get("/is_sleeping").json()["state"] == "light"
    assert poor.wait_until(lambda vmm: vmm["neighbours"]["given"] > 0)["kv_cached"] < wanted
    group.limit(GROUP)
    assert post(sleeper, "/wakeup")["after"] == "awake"
    assert sleeper.complete(prompt=[1, 2, 3], max_tokens=5)["choices"][0]["text"] == expected
