"""The engine as a process, over real sockets: what it says, what it survives, and when it ends."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import zmq
from checkpoints import tiny_checkpoint

from xllm_cli import LLM
from xllm_cli.config import make_config
from xllm_cli.core import (
    Abort,
    Fatal,
    FromEngine,
    Heartbeat,
    Loading,
    Output,
    Ready,
    Request,
    SamplingParams,
    Shutdown,
    StepEvents,
    ToEngine,
)
from xllm_cli.engine import loop
from xllm_cli.engine import parent as parent_module
from xllm_cli.engine.engine import Engine
from xllm_cli.engine.loop import Loop
from xllm_cli.engine.parent import Parent
from xllm_cli.engine.process import _keep_for_good
from xllm_cli.flags import Config

ROOT = Path(__file__).parent.parent
SECONDS = 60.0
FLAGS = {"enable_vmm_kvcache": True, "vmm_elastic": True, "max_cache_size": 64 << 20, "dtype": "float32"}


def config_of(model: Path) -> Config:
    return make_config(model=str(model), **FLAGS)


class Peer:
    """The server's end: both sockets, the death pipe and the process."""

    def __init__(self, folder: Path, config: Config) -> None:
        folder.chmod(0o700)
        (folder / "config.json").write_text(config.model_dump_json())
        self.context = zmq.Context()
        self.requests = bound(self.context, zmq.PUSH, folder / "to_engine")
        self.events = bound(self.context, zmq.PULL, folder / "from_engine")
        read_end, self.death_pipe = os.pipe()
        command = [sys.executable, "-m", "xllm_cli.engine.process", f"--runtime_dir={folder}", f"--death_fd={read_end}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, pass_fds=(read_end,), env=environment)
        os.close(read_end)
        self.decoder = msgspec.msgpack.Decoder(FromEngine)

    def send(self, message: ToEngine | bytes) -> None:
        self.requests.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    def request(self, name: str, prompt: list[int], max_tokens: int = 8) -> None:
        wanted = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.send(Request(request_id=name, prompt_ids=prompt, sampling=wanted))

    def read(self, seconds: float = SECONDS) -> FromEngine:
        assert self.events.poll(seconds * 1000), "the engine says nothing"
        return self.decoder.decode(self.events.recv())

    def read_until(self, is_last: Callable[[FromEngine], bool]) -> list[FromEngine]:
        """Messages up to the first that `is_last`."""
        deadline, messages = time.monotonic() + SECONDS, []
        while time.monotonic() < deadline:
            messages.append(self.read())
            if is_last(messages[-1]):
                return messages
        raise AssertionError(messages[-3:])

    def outputs(self, name: str) -> list[Output]:
        """The outputs of a request up to its last."""
        heard = self.read_until(lambda m: any(o.request_id == name and o.finish for o in outputs_of(m)))
        return [output for message in heard for output in outputs_of(message) if output.request_id == name]

    def idle(self) -> StepEvents:
        """The first news of an engine with nothing to do."""
        idle = self.read_until(lambda m: isinstance(m, StepEvents) and not m.snapshot.num_running)[-1]
        assert isinstance(idle, StepEvents)
        return idle

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.context.destroy(linger=0)


def bound(context: zmq.Context, kind: int, path: Path, *, receive_queue: int = 0) -> zmq.Socket:
    socket = context.socket(kind)
    socket.rcvhwm = receive_queue
    socket.bind(f"ipc://{path}")
    return socket


def outputs_of(message: FromEngine) -> list[Output]:
    return message.outputs if isinstance(message, StepEvents) else []


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """An engine that is ready; its first messages are checked here, its last exit by the last test."""
    made = Peer(tmp_path_factory.mktemp("engine"), config_of(tiny_checkpoint("llama")))
    *loading, ready = made.read_until(lambda m: not isinstance(m, Loading))
    assert isinstance(ready, Ready)
    assert [m.phase for m in loading][:2] == ["importing torch", "reading the model's configuration"]
    assert [m.seconds for m in loading] == sorted(m.seconds for m in loading)
    assert (ready.max_model_len, ready.vocab_size, ready.dtype) == (512, 320, "float32")
    yield made
    made.close()


def test_a_request_gets_its_tokens_and_the_snapshot_of_their_step(peer: Peer):
    peer.request("a", [1, 2, 3])
    outputs = peer.outputs("a")
    assert [len(output.token_ids) for output in outputs] == [1] * 8
    assert (outputs[-1].finish, outputs[-1].output_tokens) == ("length", 8)
    assert peer.idle().snapshot.counters.generation_tokens == 8


def test_a_refused_request_gets_one_output(peer: Peer):
    peer.request("long", [1] * 600)
    assert [output.error.code for output in peer.outputs("long")] == ["context_length_exceeded"]


def test_an_abort_ends_the_outputs_and_frees_the_blocks(peer: Peer):
    peer.request("gone", [7] * 40, max_tokens=400)
    peer.read_until(lambda m: any(output.request_id == "gone" for output in outputs_of(m)))
    peer.send(Abort("gone"))
    peer.send(Abort("never seen"))
    memory = peer.idle().snapshot.memory
    assert memory.kv_live == 0
    peer.request("next", [1, 2])
    assert len(peer.outputs("next")) == 8


@pytest.mark.parametrize("frame", [b"", b"\xff\x00garbage", msgspec.msgpack.encode({"type": "unknown"}), b"\xc1" * 99])
def test_bytes_that_are_no_message_kill_nothing(peer: Peer, frame: bytes):
    peer.send(frame)
    peer.request("after", [3, 4])
    assert len(peer.outputs("after")) == 8


def test_signals_of_the_terminal_are_the_servers_business(peer: Peer):
    for number in (signal.SIGINT, signal.SIGTERM):
        peer.process.send_signal(number)
    peer.request("still", [3, 4])
    assert len(peer.outputs("still")) == 8


def test_an_idle_engine_is_heard_of(peer: Peer):
    started = time.monotonic()
    for _ in range(2):
        assert isinstance(peer.read(), StepEvents | Heartbeat)
    assert time.monotonic() - started > 0.5  # and does not chatter


def test_shutdown_ends_with_0(peer: Peer):
    peer.send(Shutdown())
    assert peer.process.wait(30) == 0


def test_a_missing_model_is_fatal_with_its_exit_code(tmp_path: Path):
    peer = Peer(tmp_path, config_of(tmp_path / "nothing"))
    *_, last = peer.read_until(lambda m: not isinstance(m, Loading))
    assert isinstance(last, Fatal)
    assert "nothing does not exist" in last.message
    assert peer.process.wait(30) == last.exit_code == 1
    peer.close()


def test_the_end_of_the_server_ends_an_engine_that_hangs_in_its_load(tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama"), model)
    config = config_of(model)
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")  # whoever opens it waits for ever
    peer = Peer(tmp_path, config)
    peer.read_until(lambda m: isinstance(m, Loading) and m.phase == "reading the model's configuration")
    os.close(peer.death_pipe)
    assert peer.process.wait(30) == 1
    peer.close()


class InThread(NamedTuple):
    engine: Engine
    parent: Parent
    requests: zmq.Socket
    events: zmq.Socket


@pytest.fixture
def in_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Engine, Parent, zmq.Socket, zmq.Socket]]:
    """The loop over an engine in this process, with short patience: (engine, parent, requests, events)."""
    monkeypatch.setattr(parent_module, "SEND_QUEUE", 4)
    monkeypatch.setattr(loop, "STALL_SECONDS", 0.05)
    read_end, death_pipe = os.pipe()
    context = zmq.Context()
    requests = bound(context, zmq.PUSH, tmp_path / "to_engine")
    events = bound(context, zmq.PULL, tmp_path / "from_engine", receive_queue=1)
    parent = Parent(tmp_path, read_end)
    with LLM(tiny_checkpoint("llama"), **FLAGS) as llm, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(Loop(llm.host, parent).run)
        try:
            yield InThread(llm.engine, parent, requests, events)
        finally:
            os.close(death_pipe)
        serving.result(30)
    context.destroy(linger=0)
    parent.close()
    os.close(read_end)


def test_a_server_that_does_not_read_has_its_streams_ended(in_thread: InThread):
    engine, parent, requests, events = in_thread
    for name in "abc":
        wanted = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)
        requests.send(msgspec.msgpack.encode(Request(request_id=name, prompt_ids=[1], sampling=wanted)))
    deadline = time.monotonic() + 30
    while (engine.has_work or not parent.stalled_seconds) and time.monotonic() < deadline:
        time.sleep(0.01)
    heard: dict[str, list[Output]] = {name: [] for name in "abc"}
    while not all(outputs and outputs[-1].finish for outputs in heard.values()):
        assert events.poll(5000), {name: len(outputs) for name, outputs in heard.items()}
        for output in outputs_of(msgspec.msgpack.decode(events.recv(), type=FromEngine)):
            heard[output.request_id].append(output)
    assert {outputs[-1].error.code for outputs in heard.values()} == {"answer_not_read"}
    assert all(50 < len(outputs) < 500 for outputs in heard.values())


def test_collections_do_not_walk_what_the_start_made():
    kept: list[object] = [[] for _ in range(1000)]
    try:
        _keep_for_good()
        assert gc.get_freeze_count() > len(kept) and not any(one is kept for one in gc.get_objects())
    finally:
        gc.unfreeze()
