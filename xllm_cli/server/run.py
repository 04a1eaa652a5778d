"""The life of the API process: from a checked Config to an exit code. Knows every part, does no part's work.

    listen → runtime folder → engine → imports → serve (503) → ready → … → drain → engine down → exit

Order matters: a taken port or a bad folder costs nothing, and the engine loads while the web framework is imported.
"""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import setproctitle

from xllm_cli.errors import XllmError
from xllm_cli.flags import Config
from xllm_cli.server.engine_client import EngineClient
from xllm_cli.server.launch import EngineProcess, make_runtime_folder, remove_folder, write_private
from xllm_cli.server.listen import is_beyond_loopback, listen, urls
from xllm_cli.server.signals import StopSignals

logger = logging.getLogger(__name__)
ENGINE_COMMAND = (sys.executable, "-m", "xllm_cli.engine.process")
SHUTDOWN_SECONDS = 3.0  # for a serving engine to end by itself
LOADING_SHUTDOWN_SECONDS = 0.5  # for one that may be deep in a read


def run(config: Config, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serve until told to stop or until the engine ends; returns the process's exit code (0, 1, 3, 4, 75).

    Call it from the main thread: it installs signal handlers and starts the engine. A second SIGINT or SIGTERM ends
    the process at once with 130 or 143. Errors are printed, the cause last.
    """
    started = time.monotonic()
    logging.basicConfig(
        format="%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s",
        datefmt="%m-%d %H:%M:%S",
        level=config.service.log_level.upper(),
    )
    stop = StopSignals()
    try:
        with listen(config.service.host, config.service.port) as listener:
            _announce(listener)
            folder = make_runtime_folder()
            try:
                return _serve(config, listener, folder, stop, started, engine_command)
            finally:
                remove_folder(folder)
    except XllmError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        stop.restore()


def _announce(listener: socket.socket) -> None:
    setproctitle.setproctitle(f"xllm serve :{listener.getsockname()[1]}")
    logger.info("listening on %s; /health answers 503 until the model is loaded", " and ".join(urls(listener)))
    if is_beyond_loopback(listener):
        logger.warning("listening beyond this machine without an API key: anyone who can connect can use the model")


def _serve(
    config: Config,
    listener: socket.socket,
    folder: Path,
    stop: StopSignals,
    started: float,
    engine_command: Sequence[str],
) -> int:
    write_private(folder / "config.json", config.model_dump_json())
    client = EngineClient(folder)
    engine = EngineProcess(engine_command, folder)

    def last_words() -> None:
        engine.kill()
        remove_folder(folder)

    stop.last_words = last_words
    try:
        from xllm_cli.server.service import Service  # the engine is starting while the web framework is imported

        return Service(config, listener, client, engine, started=started).run(stop)
    finally:
        client.shutdown()
        engine.end(SHUTDOWN_SECONDS if client.ready else LOADING_SHUTDOWN_SECONDS)
        client.close()
