"""One engine among its neighbours: it shows its state, gives what it does not use, and asks when it is short.

A request is a datagram to another engine's socket; the kernel vouches for the sender's user. What a neighbour gives is
memory that is free on the device, seen by the next observation, and its answer only says that looking again is worth
it. Nothing waits here but await_answers(), for ANSWER_PATIENCE: an answer that does not come costs a later look.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from xllm_cli.core import Snapshot
from xllm_cli.neighbours.status import Status, StatusFile, read_statuses

log = logging.getLogger(__name__)

DATAGRAM_BYTES = 512
DATAGRAMS_AT_ONCE = 64
PUBLISH_SECONDS = 0.05  # while rows run; an engine that falls idle is shown at once
ASK_SECONDS = 0.05  # an unanswered question is asked again after this
OLDER_TIMES = 2.0  # what a neighbour remembers has rested so many times as long as what would go here, and
OLDER_SECONDS = 0.05  # so much longer: two that are equally busy must not take pages from each other in turn
ANSWER_PATIENCE = 0.02  # how long a step is held up for the answer of one who rests, and answers at once
SULK_SECONDS = 1.0  # nobody is waited for so soon after one who did not answer
ANSWER_SECONDS = 0.01  # what one neighbour asks more often than this is not read
NAME_CHARACTERS = 200  # of a model's name that neighbours see
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]  # what no device has would only overflow the totals
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Please make so many bytes free on the device."""

    bytes: Bytes


class Gave(msgspec.Struct, frozen=True, tag="gave"):
    """So many bytes are free now that were not; perhaps none."""

    bytes: Bytes


class Question(msgspec.Struct, frozen=True):
    """An Ask and whom to answer."""

    bytes: int
    sender: str


class PeerCounters(msgspec.Struct):
    """Total bytes asked of neighbours, received from them, and given to them; and the microseconds from the last
    question that was answered to its answer."""

    asked: int = 0
    received: int = 0
    given: int = 0
    answer_microseconds: int = 0


class Neighbours:
    """This engine's place among those of its device. Used by the engine's thread only; no call waits."""

    def __init__(
        self, folder: Path, *, model_id: str, device: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Appear in `folder` (see folder.py). Raises OSError where files or sockets cannot be made there."""
        engine = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.counters = PeerCounters()
        self._folder = folder
        self._clock = clock
        self._first = Status(engine=engine, pid=os.getpid(), model_id=model_id[:NAME_CHARACTERS], device=device)
        self._socket_path = folder / f"{engine}.sock"
        self._socket = _bound(self._socket_path)
        try:
            self._file = StatusFile(folder, self._first)
        except OSError:
            self._close_socket()
            raise
        self._encoder = msgspec.json.Encoder()
        self._decoder: msgspec.json.Decoder[Ask | Gave] = msgspec.json.Decoder(Ask | Gave)
        self._active_at = clock()
        self._outstanding = 0  # bytes asked for and not yet given
        self._awaited: set[str] = set()  # addresses of those who rest, were asked and have not answered
        self._publish_at = self._ask_at = self._ahead_at = self._asked_at = self._patient_at = 0.0
        self._last_read: dict[str, float] = {}

    def fileno(self) -> int:
        """Readable when a neighbour asks or answers."""
        return self._socket.fileno()

    def publish(self, snapshot: Snapshot, *, is_giving: bool, short: int, oldest_at: float | None) -> None:
        """Show the state after a step; with rows running only a few times a second. `is_giving`: pages that leave go
        back to the device. `short`: the bytes that requests wait for. `oldest_at`: when the prefix that would go first
        was last used, None if none would."""
        now = self._clock()
        if snapshot.num_running:
            self._active_at = now
            if now < self._publish_at:
                return
        self._publish_at = now + PUBLISH_SECONDS
        try:
            status = self._status(snapshot, is_giving=is_giving, short=short, now=now)
            self._file.write(msgspec.structs.replace(status, oldest_at=oldest_at or 0.0))
        except OSError as error:  # neighbours see what was, and ask for too much or too little
            log.debug("the status for neighbours cannot be written: %s", error)

    def _status(self, snapshot: Snapshot, *, is_giving: bool, short: int, now: float) -> Status:
        memory = snapshot.memory
        return msgspec.structs.replace(
            self._first,
            mode=memory.mode,
            total=memory.total,
            free=memory.free,
            physical=memory.physical,
            kv_live=memory.kv_live,
            kv_cached=memory.kv_cached,
            kv_spare=memory.kv_spare,
            free_handles=memory.free_handles,
            weights=memory.weights,
            limit=memory.limit,
            headroom=memory.headroom,
            headroom_limited_by=memory.headroom_limited_by,
            idle=memory.kv_cached + memory.kv_spare + memory.free_handles + memory.parked if is_giving else 0,
            short=short,
            running=snapshot.num_running,
            waiting=snapshot.num_waiting,
            active_at=self._active_at,
            written_at=now,
        )

    def others(self) -> list[Status]:
        """The other engines of the device that are alive."""
        return [status for status in read_statuses(self._folder) if status.engine != self._first.engine]

    def ask(self, nbytes: int, *, older_than: float | None = None) -> int:
        """Ask for `nbytes` of those who have idle memory, who has rested longest first. Returns the bytes asked for; 0
        while the last question is young.

        With `older_than`, a time of the clock, only those are asked who would forget something far older than that, and
        only for what lies in pages that serve nobody: prefixes here are to stay, which is worth less than a request.
        """
        now = self._clock()
        if nbytes <= 0 or now < self._ask_at or (older_than is not None and now < self._ahead_at):
            return 0
        self._ahead_at = now + ASK_SECONDS
        self._awaited.clear()
        missing = nbytes
        for peer, idle in self._askable(older_than):
            share, address = min(missing, idle), str(self._folder / f"{peer.engine}.sock")
            if share > 0 and self._send(Ask(share), address):
                missing -= share
                if not peer.running:
                    self._awaited.add(address)
        self._outstanding = nbytes - missing
        if self._outstanding or older_than is None:  # one ahead that found nobody must not hold up one in need
            self._ask_at, self._asked_at = now + ASK_SECONDS, now
        self.counters.asked += self._outstanding
        return self._outstanding

    def _askable(self, older_than: float | None) -> list[tuple[Status, int]]:
        """(neighbour, bytes to ask of it at most), in the order in which they are asked."""
        if older_than is None:
            peers = sorted(self.others(), key=lambda status: (status.running > 0, status.active_at))
            return [(peer, peer.idle) for peer in peers]
        now = self._clock()
        before = now - OLDER_TIMES * (now - older_than) - OLDER_SECONDS
        peers = [peer for peer in self.others() if peer.idle and peer.oldest_at < before]
        peers.sort(key=lambda status: status.oldest_at)
        return [(peer, min(peer.idle, peer.kv_cached + peer.kv_spare + peer.free_handles)) for peer in peers]

    def await_answers(self) -> tuple[list[Question], int]:
        """receive() until those who rest have answered the last question, for ANSWER_PATIENCE at most, and not at all
        for a while after somebody did not."""
        questions: list[Question] = []
        given = 0
        deadline = self._clock() + ANSWER_PATIENCE
        while self._awaited and self._patient_at <= self._clock():
            left = deadline - self._clock()
            if left <= 0 or not select.select([self._socket], [], [], left)[0]:
                self._patient_at = self._clock() + SULK_SECONDS
                break
            more, gave = self.receive()
            questions += more
            given += gave
        return questions, given

    def receive(self) -> tuple[list[Question], int]:
        """(what neighbours ask for, bytes they gave since the last call). Strangers and nonsense are dropped."""
        questions: list[Question] = []
        given = 0
        for _ in range(DATAGRAMS_AT_ONCE):
            try:
                text, ancillary, _, sender = self._socket.recvmsg(DATAGRAM_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                break
            message = self._read(text) if _uid(ancillary) == os.getuid() else None
            if isinstance(message, Gave):
                given += message.bytes
                self._awaited.discard(sender)
                self._outstanding -= message.bytes
                if self._outstanding <= 0:  # else the rest may still be leaving there
                    self._ask_at = self._ahead_at = 0.0
                self.counters.answer_microseconds = round((self._clock() - self._asked_at) * 1e6)
            elif message is not None and self._may_ask(sender):
                questions.append(Question(message.bytes, sender))
            elif message is not None and sender:  # it must not wait for what is not going to be done
                self._send(Gave(0), sender)
        self.counters.received += given
        return questions, given

    def answer(self, question: Question, nbytes: int) -> None:
        """Say what became of a question; call it once the pages have left."""
        self.counters.given += nbytes
        self._send(Gave(nbytes), question.sender)

    def close(self) -> None:
        """Leave the folder."""
        self._close_socket()
        self._file.close()

    def _close_socket(self) -> None:
        self._socket.close()
        self._socket_path.unlink(missing_ok=True)

    def _read(self, text: bytes) -> Ask | Gave | None:
        with suppress(msgspec.DecodeError):
            return self._decoder.decode(text)
        return None

    def _may_ask(self, sender: str) -> bool:
        """One question of a neighbour at a time: a lively one must not keep this engine from its own requests."""
        now = self._clock()
        if not sender or now - self._last_read.get(sender, 0.0) < ANSWER_SECONDS:
            return False
        if len(self._last_read) >= DATAGRAMS_AT_ONCE:
            self._last_read.clear()
        self._last_read[sender] = now
        return True

    def _send(self, message: Ask | Gave, address: str) -> bool:
        """False if nobody listens there or its queue is full."""
        try:
            self._socket.sendto(self._encoder.encode(message), address)
        except OSError as error:
            log.debug("neighbour %s cannot be reached: %s", address, error)
            return False
        return True


def _bound(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        made.bind(str(path))
        path.chmod(0o600)
    except OSError:
        made.close()
        raise
    return made


def _uid(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return int(_CREDENTIALS.unpack(content)[1])
    return None
