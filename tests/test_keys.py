"""API keys: several, from everywhere, and never seen again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xllm_cli.argv import canonical
from xllm_cli.config import print_form, resolve
from xllm_cli.errors import ConfigError
from xllm_cli.flags import Config, SecurityConfig
from xllm_cli.server.keys import ApiKeys
from xllm_cli.sources import gather


def test_keys_of_the_flag_and_the_file_are_all_accepted(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nalpha\n\n  beta  \n#gamma\n")
    keys = ApiKeys.of(SecurityConfig(api_key="one, two,", api_key_file=str(tmp_path / "keys")))
    assert keys and all(keys.accept(key) for key in ("one", "two", "alpha", "beta"))
    assert not any(keys.accept(key) for key in ("", "on", "onee", "gamma", "# ours", "one, two,", "\udcff"))
    assert not ApiKeys.of(SecurityConfig()) and not ApiKeys().accept("")


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), (b"\xff", "UTF-8"), (b"# none\n", "no key")])
def test_a_file_without_keys_is_an_error(tmp_path: Path, content: bytes | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        ApiKeys.of(SecurityConfig(api_key_file=str(tmp_path / "keys")))


def test_keys_that_no_header_can_carry_are_refused_without_telling_them() -> None:
    for key in ("with blank", "schlüssel", "tab\there"):
        with pytest.raises(ConfigError) as caught:
            ApiKeys.of(SecurityConfig(api_key=key))
        assert key not in str(caught.value)


def test_the_flag_may_be_given_again_and_the_environment_has_a_name_of_its_own() -> None:
    assert canonical(["--api_key=a", "--api-key", "b,c"]) == (["--api_key=a,b,c"], [], [])
    settings = gather({}, {"XLLM_API_KEY": "secret-1"})
    assert settings.given["api_key"] == ("secret-1", "environment XLLM_API_KEY")
    assert gather({"api_key": "x"}, {"XLLM_API_KEY": "secret-1"}).given["api_key"].value == "x"


def test_no_dump_message_or_repr_shows_a_key(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(json.dumps({"api_key": "secret-file"}))
    settings = gather({"config_json_file": str(tmp_path / "f.json"), "api_key": "secret-line"}, {})
    resolved = resolve(settings)
    assert resolved.config.security.api_key == "secret-line"
    shown = [print_form(resolved), repr(resolved.config), resolved.config.model_dump_json(), *settings.warnings]
    assert "secret" not in "".join(shown) and any("gives way" in text for text in settings.warnings)
    again = Config.model_validate_json(resolved.config.model_dump_json())
    assert again.security.api_key == "" and again.service == resolved.config.service
    (tmp_path / "f.json").write_text(json.dumps({"api_key": 31337}))
    with pytest.raises(ConfigError) as caught:
        resolve(gather({"config_json_file": str(tmp_path / "f.json")}, {}))
    assert "31337" not in str(caught.value) and "api_key" in str(caught.value)
