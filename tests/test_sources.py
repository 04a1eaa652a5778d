"""Precedence, the strict JSON file, the environment, and the source that every value keeps."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from flag_values import FREE, some_flags, words_of
from hypothesis import given
from hypothesis import strategies as st

from xllm_cli.config import resolve
from xllm_cli.errors import ConfigError
from xllm_cli.flags import FLAGS
from xllm_cli.sources import Setting, from_environment, from_file, gather


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "flags.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3)))
def test_command_line_over_file_over_environment(tmp_path: Path, given: tuple[bool, bool, bool]) -> None:
    by_environment, by_file, by_command_line = given
    command_line = {"config_json_file": str(write(tmp_path, '{"port": 2}' if by_file else "{}"))}
    settings = gather(
        command_line | ({"port": "3"} if by_command_line else {}),
        {"XLLM_FLAG_PORT": "1"} if by_environment else {},
    )
    expected = [
        Setting(3, "command line") if by_command_line else None,
        Setting(2, f"file {tmp_path}/flags.json") if by_file else None,
        Setting(1, "environment XLLM_FLAG_PORT") if by_environment else None,
    ]
    assert settings.given.get("port") == next((one for one in expected if one), None)
    assert len(settings.warnings) == (by_file and by_command_line) and not settings.errors


def test_a_conflict_names_both_values_and_equal_values_are_none(tmp_path: Path) -> None:
    file = str(write(tmp_path, '{"port": 9000, "vmm_elastic": true}'))
    settings = gather({"config_json_file": file, "port": "9001", "vmm_elastic": "1"}, {})
    assert len(settings.warnings) == 1
    assert "--port=9000" in settings.warnings[0] and "--port=9001" in settings.warnings[0]


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    settings = gather({}, {"XLLM_FLAG_CONFIG_JSON_FILE": str(write(tmp_path, '{"port": 5}'))})
    assert settings.given["port"].value == 5


def test_environment() -> None:
    settings = from_environment(
        {
            "XLLM_FLAG_VMM_ELASTIC": "yes",
            "XLLM_FLAG_PORT": "",
            "XLLM_PORT": "tcp://10.0.0.1:8010",
            "XLLM_FLAG_PROT": "1",
        }
    )
    assert settings.given == {"vmm_elastic": Setting(True, "environment XLLM_FLAG_VMM_ELASTIC")}
    assert settings.warnings == ["XLLM_FLAG_PROT names no flag and changes nothing, did you mean XLLM_FLAG_PORT?"]


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("ASCEND_RT_VISIBLE_DEVICE", "ASCEND_RT_VISIBLE_DEVICES"),
        ("ASCEND_RT_VISBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("XLLM_APIKEY", "XLLM_API_KEY"),
        ("XLLM_FLAGS_PORT", "XLLM_FLAG_<NAME>"),
        ("XLLM_FLAG_PROT", "XLLM_FLAG_PORT"),
    ],
)
def test_a_slip_in_a_variable_is_warned_of(variable: str, meant: str) -> None:
    (warning,) = from_environment({variable: "1"}).warnings
    assert warning.startswith(variable) and warning.endswith(f"changes nothing, did you mean {meant}?")


def test_a_foreign_name_in_a_variable_gets_the_advice() -> None:
    settings = from_environment({"XLLM_FLAG_MAX_NUM_SEQS": "4", "XLLM_FLAG_START_PORT": "9"})
    assert settings.warnings[0].endswith("changes nothing: use --max_seqs_per_batch")
    assert settings.given["port"] == Setting(9, "environment XLLM_FLAG_START_PORT")


def test_variables_of_others_are_none_of_ours() -> None:
    kubernetes = {"XLLM_SERVICE_HOST": "10.0.0.1", "XLLM_PORT_8010_TCP": "tcp://10.0.0.1:8010", "XLLM_HOST": "x"}
    devices = {"ASCEND_RT_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "", "SSH_KEY": "k", "OPENAI_API_KEY": "k"}
    settings = from_environment(kubernetes | devices | {"XLLM_PORT": "tcp://10.0.0.1:8010"})
    assert not settings.given and not settings.warnings and not settings.errors


def test_a_bad_environment_value_names_the_variable() -> None:
    assert from_environment({"XLLM_FLAG_PORT": "x"}).errors == [
        "--port='x' (environment XLLM_FLAG_PORT): must be an integer from 0 to 65535"
    ]


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ('{"port": 1, "host": "x"}', {"port": 1, "host": "x"}),
        ('{"max-cache-size": 5}', {"max_cache_size": 5}),
        ('{"kv_cache": {"block_size": 16}, "port": 1}', {"block_size": 16, "port": 1}),
        ('{"KVCacheConfig": {"block_size": 16}}', {"block_size": 16}),
        ('{"model": {"model": "/m"}, "host": {"host_page_mode": "4k"}}', {"model": "/m", "host_page_mode": "4k"}),
        ('{"port": null}', {}),
        ('{"random_seed": -1, "speculative_algorithm": "mtp"}', {"random_seed": None, "speculative_algorithm": "MTP"}),
        (b"\xef\xbb\xbf{}", {}),
    ],
)
def test_file(tmp_path: Path, text: str | bytes, given: dict[str, Any]) -> None:
    settings = from_file(write(tmp_path, text))
    assert {name: setting.value for name, setting in settings.given.items()} == given and not settings.errors


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prot": 1}', "no such flag 'prot', did you mean port?"),
        ('{"print_config": "true"}', "'print_config' belongs on the command line"),
        ('{"vmm": {"prot": 1}}', "no such flag 'prot'"),
        ('{"gpu-memory-utilization": 0.9}', "'gpu-memory-utilization': use --max_memory_utilization"),
        ('{"start_port": 1, "port": 2}', "'port' is given twice"),
        ('{"port": 1, "port": 2}', "'port' is given twice"),
        ('{"port": 1, "service": {"port": 2}}', "'port' is given twice"),
        ('{"block-size": 1, "block_size": 1}', "'block_size' is given twice"),
        ('{"port": 1,}', "line 1 column"),
        ('{"port": 1 // the port\n}', "line 1 column 12"),
        ('{\n "port" 1}', "line 2 column 9"),
        ('{"max_memory_utilization": NaN}', "NaN is not JSON"),
        ("[]", "the top level must be an object"),
        ("", "line 1 column 1"),
        (b"\xff", "codec can't decode"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_file(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = write(tmp_path, text)
    errors = from_file(path).errors
    assert len(errors) == 1 and said in errors[0] and str(path) in errors[0]


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert "No such file" in from_file(tmp_path / "none.json").errors[0]
    assert "Is a directory" in from_file(tmp_path).errors[0]


@pytest.mark.parametrize("name", [flag.name for flag in FREE if flag.kind == "bool"])
def test_a_true_false_flag_in_a_file_is_true_false_or_null(tmp_path: Path, name: str) -> None:
    for value in (True, False, None):
        read = from_file(write(tmp_path, json.dumps({name: value})))
        assert {one.value for one in read.given.values()} == ({value} - {None}) and not read.errors
    for wrong in ('"true"', "1", '"false"', "0", "[]"):
        with pytest.raises(ConfigError, match=rf"--{name}=.*\(file .*\): must be true or false"):
            resolve(from_file(write(tmp_path, f'{{"{name}": {wrong}}}')))


@pytest.mark.parametrize("path", ["none.json", ".", "secret.json"])
def test_an_unreadable_file_is_named(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret.json").write_bytes(b"\xff\xfe{}")
    settings = gather({"config_json_file": str(tmp_path / path)}, {})
    assert len(settings.errors) == 1 and f"--config_json_file={tmp_path / path}: " in settings.errors[0]


def test_flags_of_the_command_line_alone_are_not_read_from_elsewhere(tmp_path: Path) -> None:
    settings = from_environment({"XLLM_FLAG_FLAGFILE": "f", "XLLM_FLAG_HELP": "all"})
    assert not settings.given and len(settings.warnings) == 2
    errors = from_file(write(tmp_path, '{"dry_run": true}')).errors
    assert errors == [f"file {tmp_path}/flags.json: 'dry_run' belongs on the command line"]


@given(some_flags(), some_flags(), some_flags(), st.data())
def test_the_upper_source_wins_and_is_named(
    below: dict[str, Any], file: dict[str, Any], above: dict[str, Any], data: st.DataObject
) -> None:
    def texts(values: dict[str, Any]) -> dict[str, str]:
        said = {name: words_of(FLAGS[name], value) for name, value in values.items()}
        return {name: data.draw(st.sampled_from(words)) for name, words in said.items() if words}

    variables, typed = texts(below), texts(above)
    with TemporaryDirectory() as folder:
        path = write(Path(folder), json.dumps(file))
        read = gather(
            {**typed, "config_json_file": str(path)},
            {f"XLLM_FLAG_{name.upper()}": text for name, text in variables.items()},
        )
    sources = dict.fromkeys((name for name, text in variables.items() if text), "environment")
    sources |= {name: "file" for name, value in file.items() if value is not None} | dict.fromkeys(typed, "command")
    found = {name: one.source.split()[0] for name, one in read.given.items() if name != "config_json_file"}
    assert found == sources and not read.errors
    values = {"environment": below, "file": file, "command": above}
    assert all(read.given[name].value == values[source][name] for name, source in sources.items())
    differing = [name for name in typed if file.get(name) is not None and file[name] != above[name]]
    assert len(read.warnings) == len(differing)
