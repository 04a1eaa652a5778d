"""The JSON schema says of a file what the reader says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xllm_cli.config import resolve
from xllm_cli.declare import Flag
from xllm_cli.errors import ConfigError
from xllm_cli.flags import FLAGS, Config
from xllm_cli.schema import json_schema
from xllm_cli.sources import from_file

CHECKER = jsonschema.Draft202012Validator(json_schema())
NAMES = sorted(flag.name for flag in FLAGS.values() if flag.section != "launch")


def test_it_is_a_schema_that_every_dump_fits() -> None:
    jsonschema.Draft202012Validator.check_schema(CHECKER.schema)
    assert CHECKER.is_valid(Config().model_dump(mode="json"))
    assert CHECKER.is_valid({"KVCacheConfig": {"block_size": 16}, "random_seed": -1, "model": "/m", "port": None})


def values(flag: Flag) -> st.SearchStrategy[Any]:
    """Values near what a flag may have, right and wrong."""
    ends = [flag.meta.get("low", 0), flag.meta.get("high", 1)]
    near = [end + step for end in ends for step in (-1, 0, 1)] + [True, None, "x", "", 0.5, flag.default]
    return st.sampled_from([*near, *flag.choices, flag.meta.get("unset")])


@given(st.data())
def test_a_file_fits_exactly_when_it_is_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    content = {name: data.draw(values(FLAGS[name]))}
    path: Path = tmp_path_factory.getbasetemp() / "one.json"
    path.write_text(json.dumps(content))
    try:
        resolve(from_file(path))
        message = ""
    except ConfigError as error:
        message = str(error)
    assert CHECKER.is_valid(content) == ("must be" not in message and "no such flag" not in message), message


@pytest.mark.parametrize("content", [[], {"prot": 1}, {"vmm": {"port": 1}}, {"print_config": "true"}])
def test_what_is_no_configuration(content: Any) -> None:
    assert not CHECKER.is_valid(content)
