"""What deployment scripts do: loops over ranks, waiting, nohup, redirects, pid files, log files, service managers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import scripted_server
from checkpoints import tiny_checkpoint
from command_line import environment, shell, wait_for
from scripted_server import script, serving, write_model

from xllm_cli.flags import FLAGS

pytestmark = pytest.mark.server

# As the original's pages show it, down to the blank that follows the last flag.
LOOP = r"""
set -e
rm -rf core.*
MODEL_PATH="$MODEL"
MASTER_NODE_ADDR="127.0.0.1:9748"
START_PORT=$FREE_PORT
LOG_DIR="log"
NNODES=1

mkdir -p $LOG_DIR

for (( i=0; i<$NNODES; i++ ))
do
  PORT=$((START_PORT + i))
  LOG_FILE="$LOG_DIR/node_$i.log"
  xllm \
    --model $MODEL_PATH \
    --port $PORT \
    --master_node_addr=$MASTER_NODE_ADDR \
    --nnodes=$NNODES \
    --max_memory_utilization=0.86 \
    --max_cache_size=16MiB \
    --block_size=128 \
    --communication_backend="hccl" \
    --enable_prefix_cache=false \
    --enable_chunked_prefill=true \
    --enable_schedule_overlap=true \
    --enable_shm=true \
    --pid_file=server.pid \
    --node_rank=$i \ > $LOG_FILE 2>&1 &
done
"""
WAIT = r"""
code() { curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:$PORT/health; }
until [ "$(code)" != 000 ]; do kill -0 $!; sleep 0.05; done
echo "first $(code)"
until curl -sf http://127.0.0.1:$PORT/health >/dev/null; do
    kill -0 $! 2>/dev/null || { wait $! && status=0 || status=$?; echo "died with $status"; exit 1; }
    sleep 0.2
done
"""
STOP = r"""
ps -o args= -p "$(cat server.pid)"; ps -o args= --ppid "$(cat server.pid)"
pgrep -f '^xllm' | grep -qx "$(cat server.pid)" && echo found
kill "$(cat server.pid)"; wait $! && status=0 || status=$?; echo "ended with $status"; ls server.pid 2>&1
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_the_loop_over_ranks_runs_unchanged(tmp_path: Path) -> None:
    port = free_port()
    ran = shell(LOOP + WAIT + STOP, tmp_path, MODEL=str(tiny_checkpoint("llama")), FREE_PORT=str(port))
    assert ran.stdout.splitlines() == [
        "first 503", f"xllm serve [rank 0] :{port}", "xllm engine [rank 0]", "found", "ended with 0",
        "ls: cannot access 'server.pid': No such file or directory",
    ], ran.stdout + ran.stderr + (tmp_path / "log" / "node_0.log").read_text()  # fmt: skip
    log = (tmp_path / "log" / "node_0.log").read_text()
    assert "xllm is ready on" in log and "running `xllm serve`" in log
    line = re.compile(r"(INFO|WARNING) \d\d-\d\d \d\d:\d\d:\d\d \[\w+\.py:\d+\] .+|warning: .+|xllm is ready on .+")
    assert not [text for text in log.splitlines() if not line.fullmatch(text)]


def test_a_load_that_fails_ends_a_waiting_loop(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")  # no weights, and an architecture that nobody knows
    ran = shell(LOOP + WAIT, tmp_path, MODEL=str(model), FREE_PORT=str(free_port()))
    assert ran.returncode == 1 and ran.stdout.splitlines()[-1] == "died with 1"
    assert (tmp_path / "log" / "node_0.log").read_text().splitlines()[-1].startswith("error: ")


def test_an_elastic_cache_without_caps_serves_and_its_port_is_free_at_once(tmp_path: Path) -> None:
    flags = "--enable_vmm_kvcache=true --vmm_elastic=true --max_memory_utilization=0 --max_cache_size=0"
    flags += " --vmm_memory_reserve_bytes=1073741824"
    start = f"xllm serve $MODEL --port=$PORT --host=127.0.0.1 {flags} 2>>err &\n"
    check = "xllm check http://127.0.0.1:$PORT; kill $!; wait $! && echo ended\n"
    script = f"PORT={free_port()}\n" + 2 * (start + WAIT + check)
    ran = shell(script, tmp_path, MODEL=str(tiny_checkpoint("llama")))
    assert ran.stdout.count("all is well\nended\n") == 2, ran.stdout + (tmp_path / "err").read_text()


# --- with the scripted engine --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@contextmanager
def started(folder: Path, model: Path, flags: dict[str, Any], **popen: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A server over the scripted engine whose streams are the test's to choose; killed at the end."""
    config: dict[str, dict[str, Any]] = {}
    for name, value in {"host": "127.0.0.1", "port": 0, "model": str(model), **flags}.items():
        config.setdefault(FLAGS[name].section, {})[name] = value
    path = {"PYTHONPATH": f"{scripted_server.ROOT}:{scripted_server.ROOT / 'tests'}"}
    process = subprocess.Popen(
        [sys.executable, scripted_server.__file__, json.dumps(config)], env={**environment(folder), **path}, **popen
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_nohup_keeps_a_server_alive_and_a_hangup_ends_one_without_it(tmp_path: Path, model: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with serving(tmp_path / "a", model) as server:
            (engine,) = psutil.Process(server.wait_ready().process.pid).children()
            for pid in (server.process.pid, engine.pid):
                os.kill(pid, signal.SIGHUP)
            time.sleep(0.2)
            assert httpx.get(f"{server.url}/health").status_code == 200 and server.process.poll() is None
    finally:
        signal.signal(signal.SIGHUP, before)
    with serving(tmp_path / "b", model) as server:
        (engine,) = psutil.Process(server.wait_ready().process.pid).children()
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(30) == -signal.SIGHUP
        engine.wait(30)


def test_output_that_nobody_reads_stops_nothing(tmp_path: Path, model: Path) -> None:
    log = tmp_path / "log" / "node_0.log"
    reader, writer = os.pipe()
    with started(tmp_path, model, {"log_dir": str(log.parent)}, stdout=writer, stderr=writer) as process:
        os.close(reader)
        os.close(writer)
        url = wait_for(log, r"xllm is ready on (\S+):", process)[1].rstrip(":")
        assert httpx.get(f"{url}/health").status_code == 200
        process.terminate()
        assert process.wait(30) == 0


def test_a_closed_output_is_no_file_of_ours(tmp_path: Path) -> None:
    start = f"xllm serve --model=$MODEL --port={free_port()} --host=127.0.0.1 --max_cache_size=16MiB --log_dir=log"
    serve = f"{start} <&- >&- 2>&- & PORT={start.split('--port=')[1].split()[0]}\n"
    ends = "readlink /proc/$!/fd/0 /proc/$!/fd/1; kill $!; wait $! && echo ended\n"
    ran = shell(serve + WAIT + ends, tmp_path, MODEL=str(tiny_checkpoint("llama")))
    assert ran.stdout.splitlines()[-3:] == ["/dev/null", "/dev/null", "ended"], ran.stdout + ran.stderr


def test_log_files_are_appended_to_and_may_be_truncated(tmp_path: Path, model: Path) -> None:
    log = tmp_path / "logs" / "deep" / "node_3.log"
    flags = {"log_dir": str(log.parent), "node_rank": 3}
    for _ in range(2):
        with started(tmp_path, model, flags, stderr=subprocess.PIPE) as process:
            wait_for(log, rf"pid {process.pid}\n(.*\n)*.*xllm is ready on", process)
            process.terminate()
            assert process.wait(30) == 0 and process.stderr is not None
            assert f"the log goes on in {log}".encode() in process.stderr.read()
    assert len(re.findall(r"^INFO .*\] xllm \S+, python .*, pid \d+$", log.read_text(), re.MULTILINE)) == 2
    with started(tmp_path, model, flags, stderr=subprocess.DEVNULL) as process:
        url = wait_for(log, rf"pid {process.pid}\n(?:.*\n)*.*xllm is ready on (\S+): tiny", process)[1]
        os.truncate(log, 0)  # what logrotate's copytruncate does
        assert httpx.get(f"{url}/v1/models", headers={"x-request-id": "after"}).status_code == 200
        wait_for(log, r"\AINFO .* GET /v1/models 200 .* after\n", process)


def test_every_line_of_a_json_log_is_an_object(tmp_path: Path) -> None:
    flags = "--log_format=json --vmm_elastic --port=1 --port=0 --host=127.0.0.1 --host_memory_bytes=1MiB"
    ran = shell(f"xllm serve $MODEL {flags} 2>&1", tmp_path, MODEL=str(tiny_checkpoint("llama")))
    entries = [json.loads(line) for line in ran.stdout.splitlines()]
    assert ran.returncode == 4 and len(entries) > 8
    assert all({"time", "level", "pid", "where", "message"} <= entry.keys() for entry in entries)
    assert [entry["level"] for entry in entries[:2]] == ["WARNING", "WARNING"]
    assert entries[-1]["level"] == "ERROR" and "bytes" in entries[-1]["message"]


def test_a_server_that_is_ready_says_so_in_the_log_where_lines_are_objects(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out"
    with out.open("wb") as file, started(tmp_path, model, {"log_format": "json"}, stdout=file, stderr=file) as process:
        url = wait_for(out, r"xllm is ready on (\S+): tiny", process)[1]
        httpx.post(f"{url}/v1/completions", json={"prompt": script(say="hello", at=2, die=1)})
        assert process.wait(30) == 1
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert "the engine ended with status 1" in entries[-1]["message"]


def test_the_start_says_versions_and_flags_but_no_secret(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model, api_key="hush", log_level="debug", max_concurrent_requests=9) as server:
        text = server.wait_ready().text()
    assert re.search(r"\] xllm \S+, python \S+, torch \S+.*, pid \d+$", text, re.MULTILINE)
    flags = re.search(r"\] flags: (.*)$", text, re.MULTILINE)
    assert flags and "--max_concurrent_requests=9" in flags[1] and "--api_key=(hidden)" in flags[1]
    assert "hush" not in text and '"max_concurrent_requests":9' in text
    assert re.search(r"\] device \S*, KV cache .*, \S+ GiB in all, \S+ GiB free$", text, re.MULTILINE)


def test_a_service_manager_hears_of_the_stop(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with serving(tmp_path, model) as server:
            server.wait_ready()
            server.process.terminate()
            heard = [listener.recv(4096).decode()]
            while heard[-1] != "STOPPING=1":
                heard.append(listener.recv(4096).decode())
            assert any(text.startswith("READY=1") for text in heard)
            assert server.process.wait(30) == 0
