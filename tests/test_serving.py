"""`xllm serve` as its users meet it: real processes, real HTTP, SmolLM2 in elastic virtual memory.

One server for most tests. What it holds is read from outside: /vmm, /metrics and the blocks of the engine's memfds.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from checkpoints import tiny_checkpoint
from real_server import Serving

MIB = 1 << 20
pytestmark = pytest.mark.server
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def serving(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    flags = ("--enable_vmm_kvcache=true", "--vmm_elastic=true", "--max_cache_size=1GiB", "--block_size=16")
    made = Serving(tmp_path_factory.mktemp("serving"), smollm2, *flags)
    yield made
    assert made.stop() == 0, made.log.read_text()


@pytest.fixture(scope="module")
def client(serving: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)


def test_chat_answers_in_english_streamed_and_not(client: openai.OpenAI):
    wanted = {"model": "smollm2-135m-instruct", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**wanted)
    parts = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**wanted, stream=True)]
    assert "Paris" in whole.choices[0].message.content
    assert "".join(parts) == whole.choices[0].message.content


def test_completions_from_text_and_from_token_ids_agree(client: openai.OpenAI, serving: Serving):
    wanted = {"model": "smollm2-135m-instruct", "temperature": 0, "max_tokens": 12}
    text = client.completions.create(prompt="The capital of France is", **wanted)
    streamed = client.completions.create(prompt="The capital of France is", stream=True, **wanted)
    ids = client.completions.create(prompt=[504, 3575, 282, 4649, 314], **wanted)
    assert text.choices[0].text == "".join(c.choices[0].text for c in streamed if c.choices) == ids.choices[0].text
    assert "Paris" in text.choices[0].text


def test_stop_seed_and_usage(client: openai.OpenAI):
    wanted = {"model": "smollm2-135m-instruct", "prompt": "Count: one, two, three,", "max_tokens": 30}
    stopped = client.completions.create(**wanted, temperature=0, stop=[","])
    seeded = [client.completions.create(**wanted, temperature=1, seed=7).choices[0].text for _ in range(2)]
    assert "," not in stopped.choices[0].text
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.total_tokens == stopped.usage.prompt_tokens + stopped.usage.completion_tokens
    assert seeded[0] == seeded[1]


def test_concurrent_requests_raise_memory_and_the_repeat_of_a_long_prompt_computes_only_the_rest(serving: Serving):
    prompts = [[(37 * i + j) % 40000 + 100 for j in range(70)] for i in range(32)]
    before = serving.vmm()
    with ThreadPoolExecutor(33) as pool:
        futures = [pool.submit(serving.complete, prompt=p, max_tokens=8, ignore_eos=True) for p in prompts]
        peak = before
        while not all(future.done() for future in futures):
            peak = max(peak, serving.vmm(), key=lambda memory: memory["mapped"])
            time.sleep(0.05)
        assert all(future.result()["usage"]["completion_tokens"] == 8 for future in futures)
    assert peak["mapped"] > before["mapped"] + 40 * MIB  # 32 times 78 tokens of 22.5 KiB are 55 MiB
    assert peak["physical"] >= peak["mapped"]
    assert serving.metric("xllm:vmm_map_seconds_count") > 0
    long = [(7 * j) % 40000 + 100 for j in range(1000)]
    serving.complete(prompt=long, max_tokens=2)
    computed = serving.metric("xllm:prompt_tokens_computed_total")
    again = serving.complete(prompt=long, max_tokens=2)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 992
    assert serving.metric("xllm:prompt_tokens_computed_total") - computed == 8
    idle = serving.wait_until(lambda memory: memory["kv_spare"] == 0)
    assert idle["kv_live"] == 0 and idle["kv_cached"] > 50 * MIB
    assert serving.memfd_bytes() == idle["physical"]
    assert serving.metric("xllm:unaccounted_bytes") == 0


def test_a_client_that_leaves_gives_its_blocks_back(serving: Serving):
    body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with serving.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # kept: it hangs up when it goes
        next(lines)
        assert serving.vmm()["kv_live"] > 0
    left = serving.wait_until(lambda memory: memory["kv_live"] == 0)
    assert left["kv_live"] == 0
    assert serving.metric("vllm:num_requests_running") == 0


def test_every_report_adds_up_while_requests_run(serving: Serving):
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(serving.complete, prompt=[i] * 50, max_tokens=20) for i in range(200, 208)]
        while not all(future.done() for future in futures):
            m = serving.vmm()
            assert m["mapped"] == m["kv_live"] + m["kv_cached"] + m["kv_idle"] + m["kv_spare"] + m["weights"]
            assert m["physical"] == m["mapped"] + m["free_handles"] + m["parked"]


def test_a_taken_port_ends_the_second_server_with_3_before_it_loads(smollm2: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "xllm_cli.cli", "serve", f"--model={smollm2}", f"--port={port}"]
        ended = subprocess.run([*command, "--host=127.0.0.1"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3
    assert f"127.0.0.1:{port}" in ended.stderr.splitlines()[-1]


def test_without_prefix_cache_everything_goes_back_and_sigterm_drains(tmp_path: Path):
    flags = ("--enable_vmm_kvcache=true", "--vmm_elastic=true", "--max_cache_size=256MiB")
    serving = Serving(tmp_path, tiny_checkpoint("llama"), "--enable_prefix_cache=false", *flags)
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda i: serving.complete(prompt=[i] * 300, max_tokens=20, ignore_eos=True), range(32)))
        idle = serving.wait_until(lambda memory: memory["physical"] == 0)
        assert (idle["mapped"], idle["physical"], serving.memfd_bytes()) == (0, 0, 0)
        last = pool.submit(serving.complete, prompt=[1] * 8, max_tokens=200, ignore_eos=True)
        serving.wait_until(lambda memory: memory["kv_live"] > 0)
        serving.process.send_signal(signal.SIGTERM)
        assert last.result()["usage"]["completion_tokens"] == 200
    serving.http.close()
    assert serving.process.wait(60) == 0
