"""Where settings come from: default < environment `XLLM_FLAG_<NAME>` (and `XLLM_API_KEY`) < JSON file < command line.

Every setting keeps its source, so that a message can say who set it. Names and forms are checked here (is it a flag,
is it a number), ranges and rules in config.py.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from xllm_cli.declare import closest, did_you_mean
from xllm_cli.flags import ALIASES, FLAGS, sections
from xllm_cli.foreign_names import advice

ENVIRONMENT_PREFIX = "XLLM_FLAG_"
API_KEY_VARIABLE = "XLLM_API_KEY"
# Variables that choose devices, ours and other programs': a name that is nearly one of these is a slip. Names such as
# XLLM_PORT are none of ours: Kubernetes sets them for a service that is called xllm.
_VARIABLES = (
    API_KEY_VARIABLE,
    "ASCEND_RT_VISIBLE_DEVICES",
    "ASCEND_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "MUSA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)
_NEARLY = 0.92
_TYPED_ONLY = ("flagfile", "help")


class Setting(NamedTuple):
    """A typed value and who gave it, in words."""

    value: Any
    source: str


@dataclass(slots=True)
class Settings:
    """What was given, by flag name, and what was wrong with the rest."""

    given: dict[str, Setting] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def read_text(self, name: str, text: str, source: str) -> None:
        """Take a value written as text."""
        flag = FLAGS[name]
        try:
            self.given[name] = Setting(flag.parse(text), source)
        except ValueError:
            words = " (also 1/0, t/f, yes/no, y/n, on/off)" if flag.kind == "bool" else ""
            self.errors.append(f"--{name}={text!r} ({source}): must be {flag.expects}{words}")

    def overlay(self, upper: Settings) -> None:
        """Let another source win over what is here."""
        self.given |= upper.given
        self.warnings += upper.warnings
        self.errors += upper.errors


def gather(
    command_line: Mapping[str, str], environment: Mapping[str, str], places: Mapping[str, str] = MappingProxyType({})
) -> Settings:
    """All sources merged. `command_line` maps flag names to texts; a conflict between it and the file is warned of.
    `places` tells which of its flags a flagfile holds, and which file."""
    settings = from_environment(environment)
    top = Settings()
    for name, text in command_line.items():
        top.read_text(name, text, places.get(name, "command line"))
    file = top.given.get("config_json_file") or settings.given.get("config_json_file")
    if file is not None and file.value:
        layer = from_file(Path(file.value))
        layer.warnings += [
            f"{FLAGS[name].spell(setting.value)} ({setting.source}) gives way to "
            f"{FLAGS[name].spell(top.given[name].value)} ({top.given[name].source})"
            for name, setting in layer.given.items()
            if name in top.given and top.given[name].value != setting.value
        ]
        settings.overlay(layer)
    settings.overlay(top)
    return settings


def from_environment(environment: Mapping[str, str]) -> Settings:
    """`XLLM_API_KEY` and the `XLLM_FLAG_<NAME>` variables; an empty one is not set, an unknown one is warned of, and so
    is a name that is nearly one that means something."""
    settings = Settings()
    if key := environment.get(API_KEY_VARIABLE):
        settings.read_text("api_key", key, f"environment {API_KEY_VARIABLE}")
    for variable, text in environment.items():
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        name = ALIASES.get(name, name)
        if not text:
            continue
        if variable.startswith(ENVIRONMENT_PREFIX) and name in _TYPED_ONLY:
            settings.warnings.append(f"{variable} changes nothing: --{name} is read on the command line alone")
        elif variable.startswith(ENVIRONMENT_PREFIX) and name in FLAGS:
            settings.read_text(name, text, f"environment {variable}")
        elif hint := _slip(variable):
            settings.warnings.append(f"{variable} {hint}")
    return settings


def _slip(variable: str) -> str:
    """What a variable's name was meant to be, in words; '' when it is no business of ours."""
    if variable.startswith(ENVIRONMENT_PREFIX):
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        close = closest(name, FLAGS)
        hint = f", did you mean {ENVIRONMENT_PREFIX}{close[0].upper()}?" if close else ""
        return f"names no flag and changes nothing{f': {advice(name)}' if advice(name) else hint}"
    if variable.startswith("XLLM_") and "FLAG" in variable:
        return f"changes nothing, did you mean {ENVIRONMENT_PREFIX}<NAME>?"
    if variable in _VARIABLES or not re.search("VIS|KEY", variable):
        return ""
    close = difflib.get_close_matches(variable, _VARIABLES, n=1, cutoff=_NEARLY)
    return f"changes nothing, did you mean {close[0]}?" if close else ""


def from_file(path: Path) -> Settings:
    """The flags of a JSON file: an object of flag names, or of sections of flag names; null is "not set"."""
    settings = Settings()
    try:
        content = _load(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        settings.errors.append(f"--config_json_file={path}: {reason}")
        return settings
    if not isinstance(content, dict):
        settings.errors.append(f"--config_json_file={path}: the top level must be an object")
        return settings
    for key, value in _flat(content):
        _take_key(settings, key, value, path)
    return settings


def _take_key(settings: Settings, key: str, value: Any, path: Path) -> None:
    name, source = key.replace("-", "_"), f"file {path}"
    name = ALIASES.get(name, name)
    if name in FLAGS and FLAGS[name].section == "launch":
        settings.errors.append(f"{source}: {key!r} belongs on the command line")
    elif name not in FLAGS:
        settings.errors.append(f"{source}: {no_such_flag(repr(key), name)}")
    elif name in settings.given:
        settings.errors.append(f"{source}: {key!r} is given twice")
    elif value is not None:
        settings.given[name] = Setting(FLAGS[name].normalise(value), source)


def no_such_flag(told: str, name: str) -> str:
    """What is wrong with a name, told as it was written, and what to write instead."""
    return f"{told}: {advice(name)}" if advice(name) else f"no such flag {told}{did_you_mean(name, FLAGS)}"


def _flat(content: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """The flags of all levels; sections by attribute (`kv_cache`) or class name (`KVCacheConfig`)."""
    names = {alias for attribute, section in sections() for alias in (attribute, section.__name__)}
    for key, value in content.items():
        if key in names and isinstance(value, dict):
            yield from value.items()
        else:
            yield key, value


def _load(path: Path) -> Any:
    """Strict JSON in UTF-8, a byte-order mark allowed. ValueError says what is wrong and where."""
    text = path.read_bytes().decode("utf-8-sig")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno} column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"{key!r} is given twice")
        content[key] = value
    return content


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
