"""One record, one line: as text, as JSON, in a file; and what a process says last."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import pytest

from xllm_cli.errors import ConfigError, ModelError
from xllm_cli.flags import ServiceConfig
from xllm_cli.logs import JsonLine, TextLine, one_line, tell, to_file


def record(message: str, *arguments: object, fails: bool = False) -> logging.LogRecord:
    problem = None
    if fails:
        try:
            raise ValueError("first\nsecond")
        except ValueError:
            problem = sys.exc_info()
    return logging.LogRecord("xllm", logging.WARNING, "/a/engine.py", 12, message, arguments, problem)


def test_a_message_of_several_lines_is_one_line() -> None:
    line = TextLine(shows_tracebacks=False).format(record("%d problems\n  - a\n\n  - b\r\n", 2))
    assert line.startswith("WARNING ") and line.endswith("[engine.py:12] 2 problems | - a | - b")
    assert one_line("") == "" and one_line("a") == "a" and one_line("f(x)\n  ^^^\n  ~~^~") == "f(x)"


def test_a_traceback_has_lines_of_its_own_only_where_asked() -> None:
    short = TextLine(shows_tracebacks=False).format(record("no", fails=True))
    assert "\n" not in short and short.endswith("| ValueError: first | second")
    long = TextLine(shows_tracebacks=True).format(record("no\nway", fails=True)).splitlines()
    assert long[0].endswith("no | way") and long[1].startswith("Traceback") and long[-1] == "second"


def test_json_holds_everything_in_one_line() -> None:
    text = JsonLine().format(record('say "%s"\n漢', "x", fails=True))
    entry = json.loads(text)
    assert "\n" not in text and "漢" in text and entry["message"] == 'say "x"\n漢'
    assert (entry["level"], entry["where"], entry["pid"]) == ("WARNING", "engine.py:12", os.getpid())
    assert entry["time"].endswith("+00:00") and entry["traceback"].splitlines()[0].startswith("Traceback")


def test_stderr_goes_to_the_file_and_comes_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    service = ServiceConfig(log_dir=str(tmp_path / "a" / "b"))
    for _ in range(2):
        with to_file(service, 1):
            os.write(2, b"inside\n")
        os.write(2, b"outside\n")
    assert (tmp_path / "a" / "b" / "node_1.log").read_text() == "inside\ninside\n"
    assert capfd.readouterr().err == "outside\noutside\n"
    with to_file(ServiceConfig(), 1):
        os.write(2, b"no folder\n")
    assert capfd.readouterr().err == "no folder\n"


def test_the_cause_of_an_end_is_a_line_as_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    tell(ModelError("no weights"), ServiceConfig())
    assert capsys.readouterr().err == "error: no weights\n"


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"--log_dir=.*file/logs"),
        to_file(ServiceConfig(log_dir=f"{tmp_path}/file/logs"), 0),
    ):
        pytest.fail("opened")
