"""From settings to a checked `Config`: types, ranges and rules, all that is wrong in one message.

Knows neither spellings (argv.py) nor where settings are read from (sources.py).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from xllm_cli import facts, verdict
from xllm_cli.errors import ConfigError, XllmError
from xllm_cli.flags import FLAGS, Config, LaunchConfig
from xllm_cli.rules import Case
from xllm_cli.sources import Setting, Settings, no_such_flag

logger = logging.getLogger(__name__)


class Resolved(NamedTuple):
    """A configuration that may start. `sources` names who gave each flag; a flag that is absent has its default.

    `warnings` are the rules'; those about how it was written are in the Settings it came from.
    """

    config: Config
    launch: LaunchConfig
    sources: Mapping[str, str]
    warnings: list[str]


def make_config(**flags: Any) -> Config:
    """A checked configuration from flat flag names, as `LLM(model, **flags)` takes them; None is "unset".

    Raises ConfigError with everything that is wrong in one message. Warnings go to the log.
    """
    settings = Settings()
    for name, value in flags.items():
        if name not in FLAGS or FLAGS[name].section == "launch":
            settings.errors.append(no_such_flag(name, name))
        elif value is not None:
            plain = os.fspath(value) if isinstance(value, os.PathLike) else value
            settings.given[name] = Setting(FLAGS[name].normalise(plain), "argument")
    resolved = resolve(settings)
    for warning in resolved.warnings:
        logger.warning("%s", warning)
    return resolved.config


def resolve(settings: Settings, *, needs_model: bool = False) -> Resolved:
    """Settings → a configuration that breaks no rule. Raises ConfigError: first what is not even a configuration
    (names, types, ranges), then broken rules and unsupported values, each time all of them in one message.

    Where only the configuration is printed, it needs no model, and what cannot be served yet is a warning."""
    nested: dict[str, dict[str, Any]] = {}
    for name, setting in settings.given.items():
        nested.setdefault(FLAGS[name].section, {})[name] = setting.value
    launch = nested.pop("launch", {})
    errors = settings.errors + [
        f"{_given(name, settings)}: must be UTF-8 text without NUL"
        for name in settings.given
        if not _is_clean(name, settings)
    ]
    try:
        config = Config.model_validate(nested)
    except ValidationError as error:
        errors += [_out_of_range(str(detail["loc"][1]), settings) for detail in error.errors()]
    try:
        launched = LaunchConfig.model_validate(launch)
    except ValidationError as error:
        errors += [_out_of_range(str(detail["loc"][0]), settings) for detail in error.errors()]
    if errors:
        raise ConfigError(report(errors))
    sources = {name: setting.source for name, setting in settings.given.items()}
    case = Case(config, facts.look(config), sources)
    unbuilt = verdict.unbuilt(case)
    broken = verdict.problems(case) + ([] if launched.only_prints else unbuilt)
    if needs_model and not launched.only_prints and not config.model.model:
        broken.append("--model is missing. Fix: --model=FOLDER (`xllm fetch smollm2-135m-instruct` gets a small one)")
    if broken:
        raise ConfigError(report(broken))
    return Resolved(config, launched, sources, verdict.warnings(case) + (unbuilt if launched.only_prints else []))


def print_form(resolved: Resolved) -> str:
    """The configuration as one JSON object that `--config_json_file` reads back; with sources if they are asked for."""
    content = resolved.config.model_dump(mode="json")
    if resolved.launch.print_config == "sources":
        for values in content.values():
            for name, value in values.items():
                values[name] = {"value": value, "source": resolved.sources.get(name, "default")}
    return json.dumps(content, indent=2)


def rank_commands(resolved: Resolved) -> list[str]:
    """What to type for each rank, or for the one that was asked for: every flag that was given, in its canonical form.

    Rank r listens on port + r. A secret is told as hidden.
    """
    config = resolved.config
    own = {"port", "node_rank"}
    names = [name for name in resolved.sources if FLAGS[name].section != "launch" and name not in own]
    flags = [FLAGS[name].spell(config.value(name)) for name in names if config.value(name) is not None]
    asked, count = config.distributed.node_rank, config.distributed.nnodes
    return [
        shlex.join(["xllm", "serve", *flags, *_own_flags(config.service.port, rank, count)])
        for rank in ([asked] if asked is not None else range(count))
    ]


def _own_flags(port: int, rank: int, count: int) -> list[str]:
    return [f"--port={port + rank if port else 0}", *([f"--node_rank={rank}"] if count > 1 else [])]


def dump(resolved: Resolved) -> None:
    """Write the configuration where --dump_config_json_file says, whole or not at all; folders are made.

    XllmError when it cannot be written: nothing was loaded yet.
    """
    path = Path(resolved.launch.dump_config_json_file)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(resolved.config.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise XllmError(f"--dump_config_json_file={path} cannot be written: {error.strerror}") from error


def _is_clean(name: str, settings: Settings) -> bool:
    """False for a text that no file name and no message to the engine can hold."""
    value = settings.given[name].value
    return not isinstance(value, str) or not re.search("[\\0\ud800-\udfff]", value)


def _out_of_range(name: str, settings: Settings) -> str:
    return f"{_given(name, settings)}: must be {FLAGS[name].expects}"


def _given(name: str, settings: Settings) -> str:
    value, source = settings.given[name]
    if FLAGS[name].meta.get("is_secret"):
        return f"--{name} ({source})"
    return f"--{name}={str(value).lower() if isinstance(value, bool) else repr(value)} ({source})"


def report(problems: list[str]) -> str:
    """One problem as it is, several as a list."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems with the configuration\n" + "\n".join(f"  - {problem}" for problem in problems)
