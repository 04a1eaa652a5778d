"""Engines that share a device: what they show, what they ask for, and what becomes of those that die."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from xllm_cli.core import Counters, Snapshot, VmmReport
from xllm_cli.errors import DeviceError
from xllm_cli.neighbours import peers
from xllm_cli.neighbours.folder import device_folder
from xllm_cli.neighbours.peers import Neighbours
from xllm_cli.neighbours.status import FILE_BYTES, HEAD, Status, StatusFile, read_statuses

ROOT = Path(__file__).parent.parent
MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def join(tmp_path: Path, clock: Clock) -> Iterator[Callable[[str], Neighbours]]:
    made: list[Neighbours] = []

    def join(name: str) -> Neighbours:
        made.append(Neighbours(tmp_path, model_id=name, device="cpu", clock=clock))
        return made[-1]

    yield join
    for one in made:
        one.close()


def state(*, cached: int = 0, running: int = 0) -> Snapshot:
    return Snapshot(memory=VmmReport(kv_cached=cached), counters=Counters(), num_running=running)


def show(one: Neighbours, *, cached: int = 0, running: int = 0, short: int = 0, oldest_at: float | None = None) -> None:
    one.publish(state(cached=cached, running=running), is_giving=True, short=short, oldest_at=oldest_at)


# --- the folder


def test_one_folder_whatever_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    first = device_folder("cpu")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert device_folder("cpu") == first
    assert stat.S_IMODE(first.stat().st_mode) == 0o700


def test_devices_have_folders_of_their_own(tmp_path: Path) -> None:
    assert device_folder("npu0", tmp_path) != device_folder("npu1", tmp_path)


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    device_folder("cpu", tmp_path).parent.chmod(0o755)
    with pytest.raises(DeviceError, match="must be a folder of mode 0700"):
        device_folder("cpu", tmp_path)


def test_a_link_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"xllm-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(DeviceError, match="must be a folder"):
        device_folder("cpu", tmp_path)


def test_a_base_that_does_not_exist_is_named() -> None:
    with pytest.raises(DeviceError, match="/no/such/place"):
        device_folder("cpu", "/no/such/place")


# --- status files


def test_status_files_are_private_and_complete(tmp_path: Path, join: Callable[[str], Neighbours]) -> None:
    show(join("a"), cached=7 * MIB, short=3)
    (path,) = tmp_path.glob("*.status")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(one.stat().st_mode) for one in tmp_path.glob("*.sock")} == {0o600}
    (status,) = read_statuses(tmp_path)
    assert (status.model_id, status.pid, status.kv_cached, status.idle, status.short) == (
        "a", os.getpid(), 7 * MIB, 7 * MIB, 3,
    )  # fmt: skip


def test_a_running_engine_writes_a_few_times_a_second_and_an_idle_one_at_once(
    tmp_path: Path, join: Callable[[str], Neighbours], clock: Clock
) -> None:
    one = join("a")
    show(one, cached=1, running=1)
    show(one, cached=2, running=1)
    assert read_statuses(tmp_path)[0].kv_cached == 1
    clock.now += peers.PUBLISH_SECONDS
    show(one, cached=3, running=1)
    assert read_statuses(tmp_path)[0].kv_cached == 3
    show(one, cached=4)
    assert read_statuses(tmp_path)[0].kv_cached == 4


@pytest.mark.parametrize("place", [0, 9, 13, HEAD.size + 5])
def test_a_damaged_page_is_left_out(tmp_path: Path, join: Callable[[str], Neighbours], place: int) -> None:
    join("a")
    (path,) = tmp_path.glob("*.status")
    page = bytearray(path.read_bytes())
    page[place] ^= 0xFF
    path.write_bytes(page)
    assert read_statuses(tmp_path) == []


def test_a_short_page_and_another_versions_are_left_out(tmp_path: Path, join: Callable[[str], Neighbours]) -> None:
    join("a")
    (path,) = tmp_path.glob("*.status")
    for page in (b"", b"XLLM", b"\0" * FILE_BYTES):
        path.write_bytes(page)
        assert read_statuses(tmp_path) == []


def test_a_file_of_a_dead_engine_is_removed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from xllm_cli.neighbours.peers import Neighbours\n"
        "n = Neighbours(Path(sys.argv[1]), model_id='x', device='cpu'); print('here', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert [status.pid for status in read_statuses(tmp_path)] == [process.pid]
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert read_statuses(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["flock", "pwrite", "pread", "unlink"])
def test_a_folder_that_fails_is_an_empty_one(
    join: Callable[[str], Neighbours], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    one, _ = join("one"), join("two")
    (tmp_path / "dead.status").write_bytes(b"")
    monkeypatch.setattr(fcntl if call == "flock" else os, call, fail)
    show(one, cached=MIB)
    assert {status.model_id for status in one.others()} <= {"two"}
    monkeypatch.undo()


def test_a_long_name_is_cut(join: Callable[[str], Neighbours]) -> None:
    join("m" * 5000)
    (seen,) = join("other").others()
    assert seen.model_id == "m" * peers.NAME_CHARACTERS


def test_a_live_engines_file_survives_being_read(tmp_path: Path) -> None:
    first = Status(engine="1-a", pid=1, model_id="m", device="cpu")
    file = StatusFile(tmp_path, first)
    assert read_statuses(tmp_path) == read_statuses(tmp_path) == [first]
    file.close()
    assert read_statuses(tmp_path) == []


# --- asking and giving


def test_a_neighbour_gives_what_it_has(join: Callable[[str], Neighbours]) -> None:
    poor, rich = join("poor"), join("rich")
    show(rich, cached=10 * MIB)
    assert poor.ask(4 * MIB) == 4 * MIB
    (question,), _ = rich.receive()
    assert question.bytes == 4 * MIB
    rich.answer(question, 4 * MIB)
    assert poor.receive() == ([], 4 * MIB)
    assert (poor.counters.asked, poor.counters.received, rich.counters.given) == (4 * MIB,) * 3


def test_nobody_is_asked_for_more_than_is_idle_there(join: Callable[[str], Neighbours], clock: Clock) -> None:
    poor, first, second, busy = join("poor"), join("first"), join("second"), join("busy")
    show(busy, cached=50 * MIB, running=1)
    show(first, cached=3 * MIB)
    clock.now += 1
    show(second, cached=5 * MIB)
    assert poor.ask(9 * MIB) == 9 * MIB
    asked = [sum(question.bytes for question in one.receive()[0]) for one in (first, second, busy)]
    assert asked == [3 * MIB, 5 * MIB, 1 * MIB], "who has rested longest is asked first, who works last"


def test_for_the_sake_of_a_cache_only_what_is_older_is_asked_for_oldest_first(
    join: Callable[[str], Neighbours], clock: Clock
) -> None:
    poor, old, older, young = join("poor"), join("old"), join("older"), join("young")
    show(old, cached=3 * MIB, oldest_at=50.0, running=1)
    show(older, cached=5 * MIB, oldest_at=40.0)
    show(young, cached=9 * MIB, oldest_at=85.0)
    clock.now = 100.0
    assert poor.ask(20 * MIB, older_than=90.0) == 8 * MIB
    asked = [sum(question.bytes for question in one.receive()[0]) for one in (old, older, young)]
    assert asked == [3 * MIB, 5 * MIB, 0], "85 is hardly older: not worth it"


def test_how_much_older_it_must_be_grows_with_the_age_of_what_would_go_here(join, clock: Clock) -> None:
    poor, rich = join("poor"), join("rich")
    show(rich, cached=MIB, oldest_at=clock.now)
    for age in (0.0, 0.05, 1.0, 30.0):
        show(rich, cached=MIB, oldest_at=clock.now - peers.OLDER_TIMES * age - peers.OLDER_SECONDS + 0.001)
        assert poor.ask(MIB, older_than=clock.now - age) == 0
        clock.now += 10 * peers.ASK_SECONDS
        show(rich, cached=MIB, oldest_at=clock.now - peers.OLDER_TIMES * age - peers.OLDER_SECONDS - 0.001)
        assert poor.ask(MIB, older_than=clock.now - age) == MIB
        clock.now += 10 * peers.ASK_SECONDS


def test_weights_that_are_set_aside_are_not_asked_for_the_sake_of_a_cache(join: Callable[[str], Neighbours]) -> None:
    poor, rich = join("poor"), join("rich")
    memory = VmmReport(kv_cached=MIB, parked=30 * MIB)
    rich.publish(Snapshot(memory=memory, counters=Counters()), is_giving=True, short=0, oldest_at=None)
    assert poor.ask(4 * MIB, older_than=99.0) == MIB


def test_one_ahead_that_finds_nobody_does_not_hold_up_one_in_need(join, clock) -> None:
    poor, parked = join("poor"), join("parked")
    memory = VmmReport(parked=8 * MIB)
    parked.publish(Snapshot(memory=memory, counters=Counters()), is_giving=True, short=0, oldest_at=None)
    for _ in range(3):
        clock.now += peers.ASK_SECONDS
        assert poor.ask(MIB, older_than=clock.now) == 0, "what is set aside serves nobody here either, and stays"
    assert poor.ask(MIB) == MIB
    assert poor.ask(MIB) == 0 == poor.ask(MIB, older_than=clock.now), "it has only just asked"


def test_a_resting_neighbour_is_waited_for(join: Callable[[str], Neighbours]) -> None:
    poor, rich, other = join("poor"), join("rich"), join("other")
    show(rich, cached=2 * MIB)
    poor.ask(2 * MIB)
    (question,), _ = rich.receive()
    show(poor, cached=MIB, running=1)
    other.ask(3 * MIB)
    rich.answer(question, MIB)
    questions, given = poor.await_answers()
    assert (questions[0].bytes, given) == (MIB, MIB)
    assert poor.await_answers() == ([], 0), "it has answered"


def test_a_neighbour_that_works_is_not_waited_for(join: Callable[[str], Neighbours]) -> None:
    poor, busy = join("poor"), join("busy")
    show(busy, cached=MIB, running=1)
    assert poor.ask(MIB) == MIB
    started = time.monotonic()
    assert poor.await_answers() == ([], 0)
    assert time.monotonic() - started < peers.ANSWER_PATIENCE


def test_one_who_does_not_answer_is_waited_for_once_and_nobody_for_a_while(
    join: Callable[[str], Neighbours], clock: Clock
) -> None:
    poor, deaf = join("poor"), join("deaf")
    show(deaf, cached=50 * MIB)
    waited = []
    for pause in (0.0, peers.ASK_SECONDS, peers.SULK_SECONDS):
        clock.now += pause
        assert poor.ask(MIB) == MIB
        started = time.monotonic()
        assert poor.await_answers() == ([], 0)
        waited.append(time.monotonic() - started >= peers.ANSWER_PATIENCE / 2)
    assert waited == [True, False, True]


def test_an_engine_that_cannot_give_is_not_asked(join: Callable[[str], Neighbours]) -> None:
    poor, fixed = join("poor"), join("fixed")
    fixed.publish(state(cached=10 * MIB), is_giving=False, short=0, oldest_at=None)
    assert poor.ask(MIB) == 0


def test_a_question_is_repeated_after_a_while_or_an_answer(join: Callable[[str], Neighbours], clock: Clock) -> None:
    poor, rich = join("poor"), join("rich")
    show(rich, cached=10 * MIB)
    assert [poor.ask(MIB), poor.ask(MIB)] == [MIB, 0]
    clock.now += peers.ASK_SECONDS
    assert poor.ask(MIB) == MIB
    rich.answer(rich.receive()[0][0], MIB)
    poor.receive()
    assert poor.ask(MIB) == MIB


def test_what_is_still_leaving_is_not_asked_for_again(join: Callable[[str], Neighbours]) -> None:
    poor, rich = join("poor"), join("rich")
    show(rich, cached=10 * MIB)
    poor.ask(4 * MIB)
    (question,), _ = rich.receive()
    rich.answer(question, MIB)
    poor.receive()
    assert poor.ask(3 * MIB) == 0


def test_a_lively_neighbour_is_heard_only_so_often(join: Callable[[str], Neighbours], clock: Clock) -> None:
    poor, rich = join("poor"), join("rich")
    show(rich, cached=10 * MIB)
    for _ in range(3):
        poor._ask_at = 0.0
        poor.ask(MIB)
    assert len(rich.receive()[0]) == 1
    assert poor.await_answers() == ([], 0), "it is told, and need not wait"
    assert not poor._awaited
    clock.now += peers.ANSWER_SECONDS
    poor._ask_at = 0.0
    poor.ask(MIB)
    assert len(rich.receive()[0]) == 1


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"\xff" * 600,
        b'{"type":"ask","bytes":-1}',
        b'{"type":"ask","bytes":"1"}',
        b'{"type":"kill"}',
        b'{"type":"gave","bytes":18446744073709551615}',
    ],
)
def test_nonsense_is_dropped(tmp_path: Path, join: Callable[[str], Neighbours], text: bytes) -> None:
    one = join("a")
    (address,) = tmp_path.glob("*.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.bind(str(tmp_path / "stranger"))
        stranger.sendto(text, str(address))
    assert one.receive() == ([], 0)


def test_another_users_datagram_is_dropped(join: Callable[[str], Neighbours], monkeypatch: pytest.MonkeyPatch) -> None:
    poor, rich = join("poor"), join("rich")
    show(rich, cached=MIB)
    poor.ask(MIB)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert rich.receive() == ([], 0)


def test_a_neighbour_that_died_before_its_answer_is_nobodys_loss(join: Callable[[str], Neighbours]) -> None:
    poor, rich = join("poor"), join("rich")
    show(rich, cached=MIB)
    poor.ask(MIB)
    (question,), _ = rich.receive()
    poor.close()
    rich.answer(question, MIB)  # nobody listens: no error
    assert rich.others() == []
    join("again")


def test_a_flood_does_not_block_the_sender(join: Callable[[str], Neighbours], clock: Clock) -> None:
    poor, deaf = join("poor"), join("deaf")
    show(deaf, cached=MIB)
    sent = []
    for _ in range(2000):
        clock.now += peers.ASK_SECONDS
        sent.append(poor.ask(MIB))
    assert sent[0] == MIB and sent[-1] == 0, "its queue is full, and nobody waits for that"


def test_statuses_are_small_and_readable_by_people(tmp_path: Path, join: Callable[[str], Neighbours]) -> None:
    join("a")
    (path,) = tmp_path.glob("*.status")
    page = path.read_bytes()
    assert len(page) <= FILE_BYTES
    assert msgspec.json.decode(page[HEAD.size :])["model_id"] == "a"
