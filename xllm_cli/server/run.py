"""The life of the API process: from a checked Config to an exit code. Knows every part, does no part's work.

    keys and certificate → listen → pid file → log file → runtime folder → engine → serve (503) → imports → ready →
    … → drain → engine down → exit

Order matters: a taken port or a bad folder costs nothing, and the engine loads while the web framework is imported.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import setproctitle

from xllm_cli import logs
from xllm_cli.errors import XllmError
from xllm_cli.flags import FLAGS, Config
from xllm_cli.server.engine_client import EngineClient
from xllm_cli.server.keys import ApiKeys
from xllm_cli.server.launch import EngineProcess
from xllm_cli.server.listen import check_certificate, is_beyond_loopback, listen, urls
from xllm_cli.server.origins import allowed_origins
from xllm_cli.server.pid_file import PidFile
from xllm_cli.server.runtime_folder import RuntimeFolder
from xllm_cli.server.signals import StopSignals
from xllm_cli.versions import versions

logger = logging.getLogger(__name__)
ENGINE_COMMAND = (sys.executable, "-m", "xllm_cli.engine.process")
SHUTDOWN_SECONDS = 3.0  # for a serving engine to end by itself
LOADING_SHUTDOWN_SECONDS = 0.5  # for one that may be deep in a read


def run(config: Config, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serve until told to stop or until the engine ends; returns the process's exit code (0, 1, 2, 3, 4, 75).

    Call it from the main thread: it installs signal handlers and starts the engine. A SIGINT or SIGTERM before it
    serves ends the process at once with 0, a second one with 130 or 143. Errors are printed, the cause last.
    """
    started = time.monotonic()
    rank = config.distributed.node_rank or 0
    logs.set_up(config.service)
    stop = StopSignals()
    try:
        keys = ApiKeys.of(config.security)
        check_certificate(config.security)
        allowed_origins(config.security)  # here for its errors
        with ExitStack() as stack:
            listener = stack.enter_context(listen(config.service.host, config.service.port))
            # also hides a key on the command line
            setproctitle.setproctitle(f"xllm serve [rank {rank}] :{listener.getsockname()[1]}")
            pid_file = PidFile(config.service.pid_file)
            stack.callback(pid_file.remove)
            stop.last_words = pid_file.remove
            stack.enter_context(logs.to_file(config.service, rank))
            _announce(listener, config, has_keys=bool(keys))
            folder = RuntimeFolder()
            stack.callback(folder.remove)
            code = _serve(Parts(config, listener, keys, folder, pid_file), stop, started, engine_command)
            logger.info("stopped, %.0f s after the start", time.monotonic() - started)
            return code
    except XllmError as error:
        logs.tell(error, config.service)
        return error.exit_code
    finally:
        stop.restore()


class Parts(NamedTuple):
    """What a server owns before its engine starts."""

    config: Config
    listener: socket.socket
    keys: ApiKeys
    folder: RuntimeFolder
    pid_file: PidFile


def _announce(listener: socket.socket, config: Config, *, has_keys: bool) -> None:
    logger.info("%s, pid %d", ", ".join(f"{name} {version}" for name, version in versions().items()), os.getpid())
    logger.info("flags: %s", " ".join(_changed(config)) or "all as they are by default")
    logger.debug("configuration: %s", config.model_dump_json())
    where = " and ".join(urls(listener, config.security.ssl_certfile))
    logger.info("listening on %s; /health answers 503 until the model is loaded", where)
    if is_beyond_loopback(listener) and not has_keys:
        logger.warning(
            "listening beyond this machine without an API key: anyone who can connect can use the model "
            "(--api_key_file or XLLM_API_KEY sets one, --host=127.0.0.1 keeps it here)"
        )


def _changed(config: Config) -> Iterator[str]:
    """The flags that are not at their default, as one would type them; secrets are not told."""
    for flag in FLAGS.values():
        if flag.section != "launch" and config.value(flag.name) != flag.default:
            yield flag.spell(config.value(flag.name))


def _serve(parts: Parts, stop: StopSignals, started: float, engine_command: Sequence[str]) -> int:
    config, folder = parts.config, parts.folder
    folder.write("config.json", config.model_dump_json())
    client = EngineClient(folder.path)
    engine = EngineProcess(engine_command, folder.path)

    def last_words() -> None:
        engine.kill()
        folder.remove()
        parts.pid_file.remove()

    stop.last_words = last_words
    try:
        from xllm_cli.server.service import Service  # the engine is starting while this is imported

        return Service(config, parts.listener, parts.keys, client, engine, started=started).run(stop)
    finally:
        client.shutdown()
        engine.end(SHUTDOWN_SECONDS if client.ready else LOADING_SHUTDOWN_SECONDS)
        client.close()
