"""Every flag that works has a test that shows its effect: here, or in the file that the table names."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import xxhash
from checkpoints import tiny_checkpoint
from local_app import app_of, call, local_state, make_ready
from scripted_server import serving, write_model
from test_tools import QWEN, WEATHER

from xllm_cli import LLM
from xllm_cli.core import Counters, SamplingParams
from xllm_cli.errors import MemoryShortage
from xllm_cli.flags import FLAGS, ServiceConfig
from xllm_cli.server.constraints import parser_of
from xllm_cli.server.deltas import Delta, PlainParser
from xllm_cli.server.parsing import parse
from xllm_cli.server.protocol import ChatRequest
from xllm_cli.server.service import request_threads
from xllm_cli.server.tokenizer import Tokenizer

TESTS = Path(__file__).parent
ELSEWHERE = {
    "host": "test_listen::test_an_empty_host_is_all_interfaces",
    "port": "test_listen::test_a_free_port_is_picked_and_named",
    "max_concurrent_requests": "test_server::test_too_many_requests_are_told_to_come_back",
    "strict_requests": "test_app::test_strict_servers_refuse_unknown_fields",
    "shutdown_drain_secs": "test_app::test_draining_takes_requests_until_it_is_closed",
    "shutdown_timeout_secs": "test_service::test_a_stop_drains_and_leftover_streams_get_an_error",
    "liveness_timeout_secs": "test_app::test_liveness_ends_with_a_long_silence",
    "pid_file": "test_pid_file::test_it_holds_our_id_until_the_end",
    "access_log": "test_app::test_the_access_log_leaves_out_probes",
    "api_key": "test_keys::test_keys_of_the_flag_and_the_file_are_all_accepted",
    "api_key_file": "test_keys::test_keys_of_the_flag_and_the_file_are_all_accepted",
    "public_metrics": "test_app::test_metrics_are_open_only_by_flag",
    "allowed_origins": "test_app::test_browsers_of_allowed_origins_may_ask_without_a_key",
    "ssl_certfile": "test_service::test_a_service_with_tls_keys_and_a_killed_engine",
    "ssl_keyfile": "test_service::test_a_service_with_tls_keys_and_a_killed_engine",
    "model": "test_run::test_a_model_folder_that_is_not_there_is_named",
    "model_id": "test_flags::test_served_name",
    "enable_vmm_kvcache": "test_engine::test_the_bands_of_every_report_add_up",
    "enable_vmm_weights": "test_sleep::test_asleep_it_holds_nothing_but_what_was_set_aside",
    "enable_manual_loader": "npu/test_loading::test_the_manual_loader_needs_no_pages",
    "auto_wake": "test_sleep_habits::test_a_request_wakes_a_model_that_wakes_by_itself",
    "auto_sleep": "test_models_pool::test_the_least_recently_used_model_sleeps_for_another",
    "sleep_idle_seconds": "test_sleep_habits::test_a_model_that_nobody_asks_goes_to_sleep",
    "vmm_elastic": "test_engine::test_memory_follows_the_load_and_goes_back_within_a_second",
    "vmm_memory_reserve_bytes": "test_engine::test_a_request_alone_without_memory_gets_503_with_the_numbers",
    "memory_wait_seconds": "test_engine::test_a_request_alone_without_memory_gets_503_with_the_numbers",
    "max_cache_size": "test_engine::test_more_than_memory_could_ever_hold_is_refused_with_the_numbers",
    "max_memory_utilization": "test_host::test_the_arena_follows_ratio_and_cap",
    "random_seed": "test_engine::test_seeds_decide_and_unseeded_requests_differ",
    "enable_graph": "test_graphs_engine::test_tokens_with_and_without_graphs",
    "enable_graph_mode_decode_no_padding": "test_graphs_engine::test_flags_say_what_is_captured",
    "max_tokens_for_graph_mode": "test_graphs_engine::test_flags_say_what_is_captured",
    "acl_graph_decode_batch_size_limit": "test_graphs_engine::test_beyond_the_limit_steps_run_eagerly",
    "config_json_file": "test_sources::test_command_line_over_file_over_environment",
    "print_config": "test_cli::test_print_config_is_one_json_object_of_typed_values",
    "help": "test_cli::test_help_and_version",
    "vmm_neighbours_dir": "test_limits::test_",
    "flagfile": "test_flagfile::test_a_file_is_read_in_its_place",
    "dry_run": "test_config::test_a_dry_run_tells_the_commands_of_all_ranks",
    "enable_dump_config_json": "test_config::test_a_dump_is_written_whole_and_loads_back",
    "dump_config_json_file": "test_config::test_a_dump_is_written_whole_and_loads_back",
}
HERE = {
    "dtype", "block_size", "enable_prefix_cache", "enable_in_batch_prefix_cache", "xxh3_128bits_seed",
    "phy_page_granularity_size", "max_tokens_per_batch", "max_seqs_per_batch", "enable_chunked_prefill",
    "max_tokens_per_chunk_for_prefill", "host_memory_bytes", "host_page_mode", "rpc_idle_timeout_s",
    "num_request_handling_threads", "tool_call_parser", "reasoning_parser", "max_body_bytes", "log_level", "log_dir",
    "log_format",
}  # fmt: skip


def test_every_flag_that_works_has_a_test() -> None:
    works = {flag.name for flag in FLAGS.values() if flag.status == "works" and "supported" not in flag.meta}
    assert works == ELSEWHERE.keys() | HERE


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_named_test_is_there(name: str) -> None:
    file, _, function = ELSEWHERE[name].partition("::")
    assert re.search(rf"^def {function}", (TESTS / f"{file}.py").read_text(encoding="utf-8"), re.MULTILINE)


# --- the engine

KIB = 1 << 10
SMALL = {
    "dtype": "float32", "block_size": 16, "enable_vmm_kvcache": True, "vmm_elastic": True, "host_page_mode": "4k",
    "phy_page_granularity_size": 64 * KIB, "max_cache_size": 16 << 20,
}  # fmt: skip


def run(prompts: int = 2, length: int = 100, **flags: Any) -> tuple[Counters, list[int]]:
    """What it took to serve equal prompts: the counters, and how much of each prompt was cached."""
    with LLM(tiny_checkpoint("llama"), **{**SMALL, **flags}) as llm:
        wanted = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        answers = llm.generate([[1 + i % 200 for i in range(length)]] * prompts, wanted)
        assert [len(answer.token_ids) for answer in answers] == [2] * prompts
        return llm.snapshot.counters, [answer.cached_tokens for answer in answers]


@pytest.mark.parametrize(
    ("flags", "chunks"),
    [
        ({}, 2),
        ({"max_tokens_per_batch": 50}, 5),
        ({"max_tokens_per_chunk_for_prefill": 40}, 6),
        ({"max_tokens_per_chunk_for_prefill": 40, "enable_chunked_prefill": False}, 2),
    ],
)
def test_prompts_are_cut(flags: dict[str, Any], chunks: int) -> None:
    assert run(enable_prefix_cache=False, **flags)[0].prefill_chunks == chunks


def test_sequences_of_a_step() -> None:
    together = run(4, enable_prefix_cache=False)[0].steps
    assert run(4, enable_prefix_cache=False, max_seqs_per_batch=1)[0].steps >= together + 6


@pytest.mark.parametrize(
    ("flags", "cached"),
    [
        ({"max_seqs_per_batch": 1}, [0, 96]),
        ({"max_seqs_per_batch": 1, "block_size": 64}, [0, 64]),
        ({"max_seqs_per_batch": 1, "enable_prefix_cache": False}, [0, 0]),
        ({"enable_in_batch_prefix_cache": True}, [0, 96]),
        ({}, [0, 0]),
    ],
)
def test_prefixes_are_shared_in_whole_blocks(flags: dict[str, Any], cached: list[int]) -> None:
    assert run(**flags)[1] == cached


def test_the_seed_reaches_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: set[int] = set()
    hash_of = xxhash.xxh3_128_digest
    monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda data, seed: seeds.add(seed) or hash_of(data, seed))
    assert run(xxh3_128bits_seed=7)[1] == [0, 0] and seeds == {7}


def test_the_device_is_what_the_flags_say() -> None:
    flags = {**SMALL, "phy_page_granularity_size": 128 * KIB, "host_memory_bytes": 1 << 30, "dtype": "bfloat16"}
    with LLM(tiny_checkpoint("llama"), **flags) as llm:
        memory = llm.memory()
    assert (memory["page_bytes"], memory["total"], memory["mode"]) == (128 * KIB, 1 << 30, "4k")
    with pytest.raises(MemoryShortage):
        LLM(tiny_checkpoint("llama"), **{**flags, "host_memory_bytes": 4096, "vmm_elastic": False})


# --- the server


@pytest.mark.parametrize("count", [1, 3])
def test_so_many_threads_take_requests(count: int) -> None:
    with request_threads(ServiceConfig(num_request_handling_threads=count)) as threads:
        meeting = threading.Barrier(count)
        assert sorted(threads.map(lambda _: meeting.wait(10), range(count))) == list(range(count))
        full = threading.Barrier(count + 1)
        late = [threads.submit(full.wait, 0.2) for _ in range(count + 1)]
        assert all(isinstance(one.exception(), threading.BrokenBarrierError) for one in late)


@pytest.mark.server
def test_an_idle_connection_is_closed(tmp_path: Path) -> None:
    with serving(tmp_path, write_model(tmp_path / "tiny"), rpc_idle_timeout_s=1) as server:
        server.wait_ready()
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            received = b"".join(iter(lambda: connection.recv(65536), b""))  # until it is closed; else a timeout
        assert received.startswith(b"HTTP/1.1 200") and received.endswith(b"}")


def test_a_longer_body_is_refused(tmp_path: Path) -> None:
    with local_state(tmp_path, max_body_bytes=64) as state:
        make_ready(state, tmp_path)
        app = app_of(state)
        assert call(app, "/tokenize", "POST", json={"prompt": "x" * 20}).status_code == 200
        assert call(app, "/tokenize", "POST", json={"prompt": "x" * 60}).status_code == 413


@pytest.mark.server
def test_the_log_is_where_and_how_it_is_asked_for(tmp_path: Path) -> None:
    flags = ["--host=127.0.0.1", "--port=0", f"--log_dir={tmp_path}/logs", "--log_format=json", "--log_level=error"]
    command = [sys.executable, "-m", "xllm_cli.cli", "serve", f"--model={tmp_path}", *flags]
    assert subprocess.run(command, capture_output=True, timeout=100, check=False).returncode == 1
    lines = (tmp_path / "logs" / "node_0.log").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert str(tmp_path) in str(records) and {record["level"] for record in records} == {"ERROR"}


def parsed(folder: Path, template: str, text: str, **flags: str) -> list[Delta]:
    tokenizer = Tokenizer.from_folder(write_model(folder, template), **flags)
    asked = parse(ChatRequest, {"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER]})
    parser = parser_of(asked, tokenizer) or PlainParser()
    return [*parser.feed(text), *parser.flush()]


PLAIN = "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("template", "flags", "shows"),
    [
        (QWEN, {}, "think"),
        (QWEN, {"reasoning_parser": "auto"}, "think"),
        (QWEN, {"reasoning_parser": "none"}, None),
        (PLAIN, {}, None),
        (PLAIN, {"reasoning_parser": "qwen3"}, "think"),
        (PLAIN, {"reasoning_parser": "deepseek-r1"}, "think"),
    ],
)
def test_reasoning_is_told_apart(tmp_path: Path, template: str, flags: dict[str, str], shows: str | None) -> None:
    deltas = parsed(tmp_path, template, "<think>think</think>answer", **flags)
    assert "".join(delta.reasoning or "" for delta in deltas) == (shows or "")
    assert "".join(delta.content or "" for delta in deltas).endswith("answer")


def test_unannounced_reasoning(tmp_path: Path) -> None:
    def content(**flags: str) -> str:
        return "".join(delta.content or "" for delta in parsed(tmp_path, PLAIN, "think</think>answer", **flags))

    assert content(reasoning_parser="deepseek-r1") == "answer"
    assert content(reasoning_parser="qwen3") == "think</think>answer"


@pytest.mark.parametrize(
    ("template", "parser", "status"),
    [
        (QWEN, "", 200),
        (QWEN, "auto", 200),
        (QWEN, "none", 400),
        (PLAIN, "", 400),
        (PLAIN, "hermes", 200),
        (PLAIN, "qwen25", 200),
        (PLAIN, "qwen3", 200),
    ],
)
def test_tools_are_taken_where_calls_can_be_read(tmp_path: Path, template: str, parser: str, status: int) -> None:
    with local_state(tmp_path) as state:
        make_ready(state, tmp_path)
        state.models.first.tokenizer = Tokenizer.from_folder(
            write_model(tmp_path / "m", template), tool_call_parser=parser
        )
        body = {"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER]}
        answer = call(app_of(state), "/v1/chat/completions/render", "POST", json=body)
    assert answer.status_code == status
