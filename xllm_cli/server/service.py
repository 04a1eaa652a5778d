"""The event loop of the API process: serves, watches the engine, drains. Knows no route and no message.

It ends in one of three ways: a signal (drain, 0), the engine's end (error events, 1 or what the engine said), or a
tokenizer that cannot be read (1).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from xllm_cli.core import ErrorInfo, Fatal, Ready
from xllm_cli.errors import EngineDead
from xllm_cli.flags import Config, ServiceConfig
from xllm_cli.server.engine_client import EngineClient
from xllm_cli.server.entrance import Entrance
from xllm_cli.server.http_protocol import HttpProtocol
from xllm_cli.server.instruments import Instruments
from xllm_cli.server.keys import ApiKeys
from xllm_cli.server.launch import EngineProcess
from xllm_cli.server.listen import urls
from xllm_cli.server.notify import Notifier
from xllm_cli.server.served import Models, ServedModel
from xllm_cli.server.signals import StopSignals
from xllm_cli.server.state import ServerState

if TYPE_CHECKING:
    from xllm_cli.server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
EXIT_RANK_LOST = 75
LAST_MESSAGES_SECONDS = 0.3  # what a dead engine had sent may still be in the socket
SETTLE_SECONDS = 1.0  # for the last error events to reach their clients
CLOSE_SECONDS = 2
IDLE_SECONDS = 75  # longer than load balancers keep a connection, so that it is they who close it
PROGRESS_SECONDS = 10.0


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Service:
    """Serves `config` on `listener` for as long as the engine lives and nobody asks to stop."""

    def __init__(
        self,
        config: Config,
        listener: socket.socket,
        keys: ApiKeys,
        client: EngineClient,
        engine: EngineProcess,
        *,
        started: float,
    ) -> None:
        self._config = config
        self._listener = listener
        self._keys = keys
        self._client = client
        self._engine = engine
        self._started = started
        self._notifier = Notifier()
        instruments = Instruments(config.served_model_id)
        client.on_snapshot = instruments.step
        client.on_map = instruments.mapped
        self._first = ServedModel(config.served_model_id, config.model.model, instruments.first)
        self._state = ServerState(
            client,
            Models(self._first),
            config.service,
            instruments,
            config.model_dump(mode="json"),
        )
        self._entrance = Entrance(self._state)
        self._threads = request_threads(config.service)

    def run(self, stop: StopSignals) -> int:
        """The exit code, or EngineDead or ModelError."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._run(stop))

    async def _run(self, stop: StopSignals) -> int:
        server = _Server(self._web_config())
        asyncio.get_running_loop().set_default_executor(self._threads)
        web = asyncio.create_task(server.serve([self._listener]))
        stopped = asyncio.create_task(stop.wait())
        messages = asyncio.create_task(self._client.receive())
        ended = asyncio.create_task(self._engine.wait())
        loaded = asyncio.create_task(self._load(stop))
        watchdog = asyncio.create_task(self._feed_watchdog())
        tasks: set[asyncio.Task[object]] = {web, stopped, messages, ended, loaded}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if loaded.done():
                loaded.result()
                await asyncio.wait(tasks - {loaded}, return_when=asyncio.FIRST_COMPLETED)
            if web.done():
                web.result()  # it ends only by an error before it is asked to
            if stopped.done():
                await self._drain(ended)
                return 0
            raise await self._engine_gone(ended, messages)
        finally:
            self._engine.let_go()  # it ends while we do
            server.should_exit = True
            watchdog.cancel()
            for task in tasks - {web}:
                task.cancel()
            await asyncio.wait(tasks, timeout=2 * CLOSE_SECONDS)

    def _web_config(self) -> uvicorn.Config:
        security = self._config.security
        return uvicorn.Config(
            self._entrance,
            http=HttpProtocol,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            forwarded_allow_ips="127.0.0.1,::1",  # whom to believe about a client's address: a proxy on this machine
            timeout_keep_alive=self._config.service.rpc_idle_timeout_s or IDLE_SECONDS,
            timeout_graceful_shutdown=CLOSE_SECONDS,
            ssl_certfile=security.ssl_certfile or None,
            ssl_keyfile=security.ssl_keyfile or None,
        )

    def _open(self, loop: asyncio.AbstractEventLoop) -> Tokenizer:
        """In a thread: the web framework and the tokenizer take most of a second to import."""
        from xllm_cli.server.app import create_app
        from xllm_cli.server.tokenizer import Tokenizer

        loop.call_soon_threadsafe(self._entrance.open, create_app(self._state, self._keys, self._config.security))
        flags = self._config.model
        parsers = {"tool_call_parser": flags.tool_call_parser, "reasoning_parser": flags.reasoning_parser}
        return Tokenizer.from_folder(flags.model, **parsers)

    async def _load(self, stop: StopSignals) -> None:
        """Until requests can be served; ModelError when the tokenizer cannot be read."""
        opening = asyncio.to_thread(self._open, asyncio.get_running_loop())
        tokenizer, ready = await asyncio.gather(opening, self._engine_ready())
        if tokenizer.chat_refusal is not None:
            logger.warning("/v1/chat/completions is off: %s", tokenizer.chat_refusal)
        stop.drains = True
        self._first.tokenizer, self._first.ready = tokenizer, ready
        self._notifier.send("READY=1\nSTATUS=serving")
        memory = ready.snapshot.memory
        logger.info(
            "device %s, KV cache %s in pages of %d KiB, %.2f GiB in all, %.2f GiB free",
            memory.device, memory.mode, memory.page_bytes >> 10, memory.total / 2**30, memory.free / 2**30,
        )  # fmt: skip
        where = " and ".join(urls(self._listener, self._config.security.ssl_certfile))
        text = (
            f"xllm is ready on {where}: {self._first.model_id} ({ready.architecture}, {ready.dtype}), context "
            f"{ready.max_model_len} tokens, cache for {ready.capacity_tokens} tokens, "
            f"{time.monotonic() - self._started:.1f} s after the start"
        )
        is_plain = self._config.service.log_format == "text"
        if self._config.service.log_dir or not is_plain:
            logger.info("%s", text)
        if self._config.service.log_dir or is_plain:  # stdout may be the log's place, too
            _say(text)

    async def _engine_ready(self) -> Ready:
        """The engine's description; a phase that lasts gets a line every ten seconds."""
        while self._client.ready is None:
            self._client.changed.clear()
            phase = self._client.loading.phase if self._client.loading else "starting"
            self._notifier.send(f"STATUS=loading: {phase}\nEXTEND_TIMEOUT_USEC={3 * PROGRESS_SECONDS * 1e6:.0f}")
            try:
                await asyncio.wait_for(self._client.changed.wait(), PROGRESS_SECONDS)
            except TimeoutError:
                logger.info("loading: still %s, %.0f s after the start", phase, time.monotonic() - self._started)
        return self._client.ready

    async def _feed_watchdog(self) -> None:
        """Tell systemd twice in its interval that the engine is alive, for as long as that is so."""
        while self._notifier.watchdog_seconds is not None:
            if self._state.liveness()[1] == 200:
                self._notifier.send("WATCHDOG=1")
            await asyncio.sleep(self._notifier.watchdog_seconds / 2)

    async def _drain(self, ended: asyncio.Task[int]) -> None:
        """Readiness off; after a moment no new requests; what is still open at the deadline gets an error event."""
        self._notifier.send("STOPPING=1")
        logger.info("stopping: %d requests are open", self._state.open_requests)
        can_serve = self._state.phase == "ready"
        self._state.draining = True
        if can_serve:
            await asyncio.wait({ended}, timeout=self._config.service.shutdown_drain_secs)
        self._state.is_closed = True
        deadline = time.monotonic() + self._config.service.shutdown_timeout_secs
        while self._state.open_requests and time.monotonic() < deadline and not ended.done():
            await asyncio.sleep(0.02)
        await self._fail_open("the server is shutting down", "shutting_down")

    async def _engine_gone(self, ended: asyncio.Task[int], messages: asyncio.Task[None]) -> EngineDead:
        """Readiness off, an error event to every open request; returns what the process ends with."""
        await asyncio.wait({messages}, timeout=LAST_MESSAGES_SECONDS)
        failure = self._client.failure or _unexplained(ended, messages)
        self._client.failure = failure
        await self._fail_open("the engine ended while this request ran", "engine_dead")
        error = EngineDead(failure.message)
        served = self._client.ready is not None
        error.exit_code = EngineDead.exit_code if served and failure.exit_code != EXIT_RANK_LOST else failure.exit_code
        return error

    async def _fail_open(self, message: str, code: str) -> None:
        self._client.fail_all(ErrorInfo(message, 503, code))
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._state.open_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


def request_threads(service: ServiceConfig) -> ThreadPoolExecutor:
    """The threads in which long prompts become tokens."""
    return ThreadPoolExecutor(service.num_request_handling_threads, "xllm-request")


def _unexplained(ended: asyncio.Task[int], messages: asyncio.Task[None]) -> Fatal:
    """What is known of an engine that ended without a word, or said something that cannot be read."""
    if messages.done() and (error := messages.exception()) is not None:
        return Fatal(str(error))
    status = ended.result() if ended.done() else 1
    if status < 0:
        return Fatal(f"the engine was ended by {signal.Signals(-status).name}")
    return Fatal(f"the engine ended with status {status}; its last lines say why", exit_code=status or 1)


def _say(text: str) -> None:
    """One line on stdout, if anybody still reads it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)
