"""From settings to a checked `Config`: types, ranges and rules, all that is wrong in one message.

Knows neither spellings (argv.py) nor where settings are read from (sources.py).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from xllm_cli import facts, rules
from xllm_cli.declare import did_you_mean
from xllm_cli.errors import ConfigError
from xllm_cli.flags import FLAGS, Config, LaunchConfig
from xllm_cli.sources import Setting, Settings

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
            settings.errors.append(f"no such flag {name}{did_you_mean(name, FLAGS)}")
        elif value is not None:
            plain = os.fspath(value) if isinstance(value, os.PathLike) else value
            settings.given[name] = Setting(FLAGS[name].normalise(plain), "argument")
    resolved = resolve(settings)
    for warning in resolved.warnings:
        logger.warning("%s", warning)
    return resolved.config


def resolve(settings: Settings, *, needs_model: bool = False, is_dry: bool = False) -> Resolved:
    """Settings → a configuration that breaks no rule. Raises ConfigError: first what is not even a configuration
    (names, types, ranges), then broken rules and unsupported values, each time all of them in one message.

    Nothing is served when `is_dry`: what is valid and cannot be served yet is a warning then."""
    nested: dict[str, dict[str, Any]] = {}
    for name, setting in settings.given.items():
        nested.setdefault(FLAGS[name].section, {})[name] = setting.value
    launch = nested.pop("launch", {})
    errors = list(settings.errors)
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
    case = rules.Case(config, facts.look(config), sources)
    unbuilt = rules.unbuilt(case)
    broken = rules.problems(case) + ([] if is_dry else unbuilt)
    if needs_model and not config.model.model:
        broken.append("--model is missing. Fix: --model=FOLDER (`xllm fetch smollm2-135m-instruct` gets a small one)")
    if broken:
        raise ConfigError(report(broken))
    return Resolved(config, launched, sources, rules.warnings(case) + (unbuilt if is_dry else []))


def print_form(resolved: Resolved) -> str:
    """The configuration as one JSON object that `--config_json_file` reads back; with sources if they are asked for."""
    content = resolved.config.model_dump(mode="json")
    if resolved.launch.print_config == "sources":
        for values in content.values():
            for name, value in values.items():
                values[name] = {"value": value, "source": resolved.sources.get(name, "default")}
    return json.dumps(content, indent=2)


def _out_of_range(name: str, settings: Settings) -> str:
    value, source = settings.given[name]
    if FLAGS[name].meta.get("is_secret"):
        return f"--{name} ({source}): must be {FLAGS[name].expects}"
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"--{name}={shown} ({source}): must be {FLAGS[name].expects}"


def report(problems: list[str]) -> str:
    """One problem as it is, several as a list."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems with the configuration\n" + "\n".join(f"  - {problem}" for problem in problems)
