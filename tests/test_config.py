"""One message for all that is wrong; a configuration that arrives as it was sent."""

from __future__ import annotations

import json
import logging
import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from flag_values import some_flags, texts
from hypothesis import given
from hypothesis import strategies as st

from xllm_cli.argv import canonical
from xllm_cli.config import dump, make_config, print_form, rank_commands, resolve
from xllm_cli.errors import ConfigError, XllmError
from xllm_cli.facts import look
from xllm_cli.flags import FLAGS, Config, SecurityConfig
from xllm_cli.rules import Case
from xllm_cli.sources import Setting, Settings, from_file, gather
from xllm_cli.verdict import broken_rules


def refusal(**flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make_config(**flags)
    return str(caught.value)


def test_flat_names_find_their_sections() -> None:
    config = make_config(
        model=Path("/m"), enable_vmm_kvcache=True, vmm_elastic=True, port=0, max_memory_utilization=None
    )
    assert config.model.model == "/m" and config.vmm.vmm_elastic and config.service.port == 0
    assert config.kv_cache.max_memory_utilization is None


def test_names_types_and_ranges_in_one_message() -> None:
    message = refusal(blok_size=3, port=70000, vmm_elastic="true", max_memory_utilization=1.5, dtype="int3", host=3)
    assert message.startswith("6 problems")
    assert "no such flag blok_size, did you mean block_size?" in message
    assert "--port=70000 (argument): must be an integer from 0 to 65535" in message
    assert "--vmm_elastic='true' (argument): must be true or false" in message
    assert "--max_memory_utilization=1.5 (argument): must be a number from 0 to 1" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 1.5, True, "0.5"])
def test_ratio_range(value: Any) -> None:
    assert "a number from 0 to 1" in refusal(max_memory_utilization=value)


@pytest.mark.parametrize("value", [True, 128.0, "128", 0, 4097])
def test_integer_range(value: Any) -> None:
    assert "an integer from 1 to 4096" in refusal(block_size=value)


@pytest.mark.parametrize("value", [0, 4095, 4097, 2**31])
def test_page_size_is_a_multiple(value: int) -> None:
    assert "from 4096 to 1073741824, a multiple of 4096" in refusal(phy_page_granularity_size=value)


@pytest.mark.parametrize("name", ["print_config", "help", "config_json_file"])
def test_flags_of_the_command_are_none_of_the_configuration(name: str) -> None:
    assert f"no such flag {name}" in refusal(**{name: "true"})


def test_broken_rules_and_what_is_not_built_in_one_message() -> None:
    message = refusal(enable_vmm_weights=True, max_memory_utilization=0.0, num_speculative_tokens=1)
    assert message.startswith("3 problems")
    assert "R3:" in message and "R13:" in message and message.count("not supported yet") == 1


@pytest.mark.parametrize(
    "flags",
    [
        {"num_speculative_tokens": 3, "speculative_algorithm": "Suffix"},
        {"draft_model": "/d", "num_speculative_tokens": 3, "enable_vmm_kvcache": True, "enable_task_pipeline": False},
        {"device": "cuda"},
        {"nnodes": 2},
        {"node_rank": 1},
        {"backend": "vlm"},
        {"kv_cache_dtype": "int8"},
        {"host_blocks_factor": 2.0},
        {"enable_disagg_pd": True},
    ],
)
def test_valid_but_not_built(flags: dict[str, Any]) -> None:
    message = refusal(**flags)
    assert re.search(r"(is|are) not supported yet: ", message) and not re.search(r"\bR\d", message)


def test_unbuilt_flags_at_rest_are_fine() -> None:
    make_config(nnodes=1, node_rank=0, device="auto", backend="llm", host_blocks_factor=1.0, enable_task_pipeline=False)


def test_warnings_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make_config(vmm_elastic=True)
    assert len(caplog.records) == 1 and "--vmm_elastic=true (argument)" in caplog.text


def test_a_missing_model_is_one_problem_among_others() -> None:
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*R13.*--model is missing"):
        resolve(Settings(given={"max_memory_utilization": Setting(0.0, "command line")}), needs_model=True)


def configurations() -> st.SearchStrategy[Config]:
    return st.builds(
        make_config,
        model=texts(),
        port=st.integers(0, 65535),
        enable_vmm_kvcache=st.booleans(),
        vmm_elastic=st.booleans(),
        max_memory_utilization=st.none() | st.floats(0.01, 1),
        max_cache_size=st.integers(0, 2**63 - 1),
        random_seed=st.none() | st.integers(-1, 2**31 - 1),
        dtype=st.sampled_from(["auto", "bfloat16", "float32"]),
    )


@given(configurations())
def test_json_round_trip(config: Config) -> None:
    assert Config.model_validate_json(config.model_dump_json()) == config
    assert not broken_rules(Case(config))


def test_the_printed_form_loads_back_as_a_file(tmp_path: Path) -> None:
    config = make_config(model="/m", enable_vmm_kvcache=True, random_seed=-1, max_memory_utilization=0.3, node_rank=0)
    resolved = resolve(Settings(given={"model": Setting("/m", "command line")}))
    path = tmp_path / "flags.json"
    path.write_text(print_form(resolved._replace(config=config)))
    assert resolve(from_file(path)).config == config


def test_the_printed_form_with_sources() -> None:
    given = {"port": Setting(1, "environment XLLM_FLAG_PORT"), "print_config": Setting("sources", "command line")}
    printed = json.loads(print_form(resolve(Settings(given=given))))
    assert printed["service"]["port"] == {"value": 1, "source": "environment XLLM_FLAG_PORT"}
    assert printed["service"]["host"] == {"value": "", "source": "default"}


def typed(**flags: Any) -> Settings:
    return Settings(given={name: Setting(value, "command line") for name, value in flags.items()})


MTP = {"draft_model": "/models/mtp", "speculative_algorithm": "MTP", "num_speculative_tokens": 3}
MTP |= {"enable_vmm_kvcache": True, "enable_vmm_weights": False, "enable_task_pipeline": False}


def test_what_is_valid_but_not_built_may_be_printed() -> None:
    resolved = resolve(typed(**MTP, nnodes=2, print_config="true"), needs_model=True)
    assert len(resolved.warnings) == 2 and all("not supported yet" in warning for warning in resolved.warnings)
    with pytest.raises(ConfigError, match="3 problems"):  # of the model, too
        resolve(typed(**MTP, nnodes=2), needs_model=True)


@pytest.mark.parametrize("flags", [{"dit_debug_print": True}, {"enable_xtensor": True}, {"node_rank": 1}])
def test_what_will_never_be_valid_may_not(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        resolve(typed(**flags, print_config="true"))


def test_a_dry_run_tells_the_commands_of_all_ranks() -> None:
    resolved = resolve(typed(**MTP, model="/m y", port=9000, nnodes=2, api_key="secret", dry_run=True))
    commands = rank_commands(resolved)
    assert [command.rpartition("--port=")[2] for command in commands] == ["9000 --node_rank=0", "9001 --node_rank=1"]
    assert all("secret" not in command and "dry_run" not in command for command in commands)
    read = gather(dict(arg[2:].split("=", 1) for arg in canonical(shlex.split(commands[1])[2:]).argv), {})
    assert {name: read.given[name].value for name in MTP} == MTP and read.given["model"].value == "/m y"
    (alone,) = rank_commands(resolve(typed(node_rank=0, port=0, max_memory_utilization=None)))
    assert alone == "xllm serve --port=0"


def test_a_dump_is_written_whole_and_loads_back(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    resolved = resolve(typed(model="/m", random_seed=7, api_key="secret", dump_config_json_file=str(path)))
    dump(resolved)
    dump(resolved)
    assert [file.name for file in path.parent.iterdir()] == ["b.json"] and "secret" not in path.read_text()
    again = resolve(from_file(path))
    assert again.config == resolved.config.model_copy(update={"security": SecurityConfig()}) and not again.warnings


@pytest.mark.parametrize("where", ["file/x.json", "."])
def test_a_dump_that_cannot_be_written_ends_the_start_with_1(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(XllmError, match="cannot be written") as caught:
        dump(resolve(typed(dump_config_json_file=f"{tmp_path}/{where}")))
    assert caught.value.exit_code == 1 and [file.name for file in tmp_path.iterdir()] == ["file"]


@given(some_flags())
def test_any_accepted_configuration_breaks_no_rule_and_loads_back(flags: dict[str, Any]) -> None:
    try:
        resolved = resolve(typed(**flags, print_config="true"))
    except ConfigError:
        return
    assert not broken_rules(Case(resolved.config, look(resolved.config)))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "flags.json"
        path.write_text(print_form(resolved), encoding="utf-8")
        read = from_file(path)
    read.given["print_config"] = Setting("true", "command line")
    assert resolve(read).config == resolved.config.model_copy(update={"security": read_back(resolved.config)})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(sorted(FLAGS)), inner, max_size=2),
    max_leaves=4,
)
NAMES = st.sampled_from([*FLAGS, "vmm", "KVCacheConfig", "model", "host", "seed"]) | st.text(max_size=5)


@given(st.dictionaries(NAMES, JSON, max_size=5), st.booleans())
def test_no_file_does_worse_than_a_message(content: dict[str, Any], prints: bool) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "flags.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        read = from_file(path)
    read.given["print_config"] = Setting("true" if prints else "false", "command line")
    try:
        config = resolve(read, needs_model=True).config
    except ConfigError as error:
        assert str(error)
    else:
        assert Config.model_validate_json(config.model_dump_json()) is not None


@pytest.mark.parametrize(("text", "shown"), [("a\0b", "'a\\x00b'"), ("/m\udcff", "'/m\\udcff'")])
def test_a_text_that_cannot_be_a_path_is_refused(text: str, shown: str) -> None:
    assert refusal(model=text) == f"--model={shown} (argument): must be UTF-8 text without NUL"
    assert refusal(api_key=text) == "--api_key (argument): must be UTF-8 text without NUL"


def read_back(config: Config) -> SecurityConfig:
    """What is left of a section with a secret."""
    return SecurityConfig.model_validate(config.security.model_dump())


def test_a_configuration_crosses_a_process() -> None:
    sent = make_config(model="/m", enable_vmm_kvcache=True, vmm_elastic=True, vmm_memory_reserve_bytes=2**30)
    code = "import sys; from xllm_cli.flags import Config; c = Config.model_validate_json(sys.stdin.read());"
    code += "print(c.model_dump_json())"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        input=sent.model_dump_json(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert Config.model_validate_json(answer.stdout) == sent
