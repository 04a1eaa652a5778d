"""From settings to a checked `Config`: types, ranges and rules, all that is wrong in one message.

Knows neither spellings (argv.py) nor where settings are read from (sources.py).
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from xllm_cli.errors import ConfigError
from xllm_cli.flags import FLAGS, Config


def make_config(**flags: Any) -> Config:
    """A checked configuration from flat flag names, as `LLM(model, **flags)` takes them; None is "unset".

    Raises ConfigError with everything that is wrong in one message. Warnings go to the log.
    """
    nested: dict[str, dict[str, Any]] = {}
    for name, value in flags.items():
        if name not in FLAGS:
            raise ConfigError(f"--{name}: no such flag")
        if value is not None:
            nested.setdefault(FLAGS[name].section, {})[name] = value
    try:
        return Config.model_validate(nested)
    except ValidationError as error:
        raise ConfigError(str(error)) from None
