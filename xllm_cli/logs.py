"""How a process logs: a record is one line, as text or as JSON, on stderr or in the file of --log_dir.

Server and engine call `set_up`; only the server opens the file, on the descriptor of stderr, which the engine and
whatever else it starts inherit. Knows nothing of what is logged.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from xllm_cli.errors import ConfigError, XllmError
from xllm_cli.flags import ServiceConfig

STDERR = 2
_TEXT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"


def set_up(service: ServiceConfig) -> None:
    """Log to stderr from now on, in UTF-8 whatever the locale. Does nothing where somebody has set logging up."""
    root = logging.getLogger()
    if root.handlers:
        return
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLine() if service.log_format == "json" else TextLine(service.log_level == "debug"))
    root.addHandler(handler)
    root.setLevel(service.log_level.upper())
    logging.captureWarnings(True)  # they have two lines of their own otherwise


class TextLine(logging.Formatter):
    """`LEVEL mm-dd HH:MM:SS [file:line] message`; the lines of a message or a traceback are joined by bars.

    With `shows_tracebacks` those alone keep their lines.
    """

    def __init__(self, shows_tracebacks: bool) -> None:
        super().__init__(_TEXT, "%m-%d %H:%M:%S")
        self._shows_tracebacks = shows_tracebacks

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        record.message = record.getMessage()
        record.asctime = self.formatTime(record, self.datefmt)
        line = one_line(self.formatMessage(record))
        if not record.exc_info:
            return line
        traceback = self.formatException(record.exc_info)
        return f"{line}\n{traceback}" if self._shows_tracebacks else f"{line} | {one_line(traceback)}"


class JsonLine(logging.Formatter):
    """One JSON object: time (UTC), level, pid, where, message, and traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "pid": record.process,
            "where": f"{record.filename}:{record.lineno}",
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def one_line(text: str) -> str:
    """Its lines, joined by bars; those that only underline another are left out."""
    return " | ".join(part for line in text.splitlines() if (part := line.strip()).strip("^~"))


def tell(error: XllmError, service: ServiceConfig) -> None:
    """What a process ends with, as the last line on stderr."""
    if service.log_format == "json":
        logging.getLogger(__name__).error("%s", error)
    else:
        print(f"error: {error}", file=sys.stderr, flush=True)


@contextmanager
def to_file(service: ServiceConfig, rank: int) -> Iterator[None]:
    """Everything that is written on stderr goes to node_RANK.log in --log_dir, an error that ends this included.

    Lines are appended, so that a rotation that copies and truncates loses nothing. ConfigError when the file cannot be
    opened. Without --log_dir nothing changes.
    """
    if not service.log_dir:
        yield
        return
    path = os.path.join(service.log_dir, f"node_{rank}.log")
    try:
        os.makedirs(service.log_dir, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"--log_dir={service.log_dir}: {error.filename}: {error.strerror}") from error
    logging.getLogger(__name__).info("the log goes on in %s", path)
    before = os.dup(STDERR)
    try:
        os.dup2(file, STDERR)
        os.close(file)
        yield
    except XllmError as error:
        tell(error, service)
        raise
    finally:
        os.dup2(before, STDERR)
        os.close(before)
