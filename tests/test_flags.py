"""The declarations: complete, consistent, and read back by the generators as they were written."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
from flag_values import FREE
from pydantic import ValidationError

from xllm_cli.config import resolve
from xllm_cli.declare import Flag, closest, did_you_mean
from xllm_cli.errors import ConfigError
from xllm_cli.flags import FLAGS, Config, LaunchConfig, sections
from xllm_cli.sources import Setting, Settings

GIB = 2**30


def test_every_declaration_is_a_flag_with_help_and_a_default_that_is_supported() -> None:
    declared = [name for _, section in sections() for name in section.model_fields]
    assert sorted([*declared, *LaunchConfig.model_fields]) == sorted(FLAGS)
    for flag in FLAGS.values():
        assert flag.help and flag.is_supported(flag.default), flag.name
        assert ("why" in flag.meta) == (flag.status != "works" or "supported" in flag.meta), flag.name


def test_a_default_validates_and_is_its_own_normal_form() -> None:
    config = Config.model_validate(Config().model_dump())
    for flag in FLAGS.values():
        if flag.section != "launch":
            assert config.value(flag.name) == flag.default == flag.normalise(flag.default)


def test_defaults_that_the_specification_fixes() -> None:
    config = Config()
    assert not config.vmm.enable_vmm_kvcache and not config.vmm.enable_vmm_weights and not config.vmm.vmm_elastic
    assert config.vmm.vmm_memory_reserve_bytes == 0 and config.scheduler.enable_task_pipeline is None
    assert config.kv_cache.max_memory_utilization is None and config.kv_cache.enable_prefix_cache
    assert config.kv_cache.block_size == 128 and config.kv_cache.xxh3_128bits_seed == 1024
    assert config.service.port == 8010 and config.service.host == "" and config.scheduler.memory_wait_seconds == 60


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        Config().vmm.vmm_elastic = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("vmm", "ratio", "effective"),
    [
        ({}, None, 0.8),
        ({"enable_vmm_kvcache": True}, None, 0.8),
        ({"enable_vmm_kvcache": True, "vmm_elastic": True}, None, 0.0),
        ({"enable_vmm_weights": True, "vmm_elastic": True}, None, 0.8),
        ({"vmm_elastic": True}, None, 0.8),
        ({"enable_vmm_kvcache": True, "vmm_elastic": True}, 0.5, 0.5),
        ({"enable_vmm_kvcache": True}, 0.0, 0.0),
    ],
)
def test_effective_ratio(vmm: dict[str, bool], ratio: float | None, effective: float) -> None:
    config = Config.model_validate({"vmm": vmm, "kv_cache": {"max_memory_utilization": ratio}})
    assert config.kv_ratio == effective
    assert config.kv_cache.max_memory_utilization == ratio  # "unset" stays unset


def test_weights_imply_the_manual_loader_and_kv_does_not() -> None:
    def implied(**vmm: bool) -> bool:
        return Config.model_validate({"vmm": vmm}).implied_manual_loader

    assert implied(enable_vmm_weights=True) and not implied(enable_vmm_kvcache=True)
    assert Config.model_validate({"load": {"enable_manual_loader": True}}).implied_manual_loader


@pytest.mark.parametrize(("model", "model_id", "name"), [("/m/a", "", "a"), ("/m/a/", "", "a"), ("/m/a", "b", "b")])
def test_served_name(model: str, model_id: str, name: str) -> None:
    assert Config.model_validate({"model": {"model": model, "model_id": model_id}}).served_model_id == name


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_cache_size", "1073741824", GIB),
        ("max_cache_size", "1GiB", GIB),
        ("max_cache_size", "1g", GIB),
        ("max_cache_size", "512MiB", GIB // 2),
        ("max_cache_size", "2k", 2048),
        ("max_cache_size", "1_000", 1000),
        ("max_cache_size", "9223372036854775807", 2**63 - 1),
        ("port", "8_010", 8010),
        ("random_seed", "-1", None),
        ("max_tokens_per_chunk_for_prefill", "-1", None),
        ("max_memory_utilization", "0.5", 0.5),
        ("vmm_elastic", "oN", True),
        ("speculative_algorithm", "eagle3", "Eagle3"),
        ("device", "CPU", "cpu"),
        ("print_config", "1", "true"),
        ("host", "", ""),
    ],
)
def test_text_is_parsed(name: str, text: str, value: object) -> None:
    parsed = FLAGS[name].parse(text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("port", text) for text in ("0x10", "1.0", "", " 1", "1k", "_1", "1__0", "\u0661", "9" * 5000)),
        *(("max_cache_size", text) for text in ("1.5GiB", "1GB", "GiB", "1 GiB", "-")),
        *(("vmm_elastic", text) for text in ("", "maybe", "2", "tru")),
        *(("max_memory_utilization", text) for text in ("", "half", " 0.5", "\u0661")),
    ],
)
def test_text_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError):
        FLAGS[name].parse(text)


def test_expected_values_in_words() -> None:
    assert FLAGS["port"].expects == "an integer from 0 to 65535"
    assert FLAGS["max_memory_utilization"].expects == "a number from 0 to 1"
    assert FLAGS["memory_wait_seconds"].expects == "a number of at least 0"
    assert FLAGS["max_cache_size"].expects == "bytes (KiB, MiB, GiB allowed) from 0 to 9223372036854775807"
    assert FLAGS["backend"].expects == 'one of "", llm, vlm, dit, rec'


def test_suggestions_are_near_or_begun_and_otherwise_absent() -> None:
    assert closest("prot", FLAGS)[0] == "port"
    assert "max_memory_utilization" in closest("max_mem", FLAGS)
    assert did_you_mean("qqqq", FLAGS) == ""


# --- the original's flags

TABLE = Path(__file__).parent / "data" / "upstream_flags.tsv"
UPSTREAM = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines(), delimiter="	"))
KINDS = {"bool": {"bool"}, "string": {"str", "choice"}, "double": {"float"}}
RANGES = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1), "uint32": (0, 2**32 - 1)}
RANGES["uint64"] = (0, 2**64 - 1)
OTHER_DEFAULTS = {
    "max_memory_utilization": (None, "unset is 0.8 for a fixed pool and for physical KV, and 0 for elastic KV"),
    "node_rank": (None, "unset starts all ranks of this host, 0 only the first"),
    "enable_block_copy_kernel": (None, "the original's default depends on the device"),
    "max_global_ttft_ms": (2**31 - 1, "written as a name of C++"),
    "max_global_tpot_ms": (2**31 - 1, "written as a name of C++"),
}


def upstream_default(row: dict[str, str]) -> Any:
    """The value that the original's default means here."""
    text = row["default"].strip('"')
    return FLAGS[row["flag"]].parse(text)


@pytest.mark.parametrize("row", UPSTREAM, ids=lambda row: row["flag"])
def test_a_flag_of_the_original_is_known_with_its_type_and_default(row: dict[str, str]) -> None:
    flag = FLAGS[row["flag"]]
    assert flag.kind in KINDS.get(row["type"], {"int", "bytes"})
    if row["flag"] in OTHER_DEFAULTS:
        assert flag.default == OTHER_DEFAULTS[row["flag"]][0]
    else:
        assert flag.default == upstream_default(row) and type(flag.default) is type(upstream_default(row))
    if row["type"] in RANGES:
        low, high = RANGES[row["type"]]
        assert low <= flag.meta["low"] <= flag.meta["high"] <= high


def test_the_table_is_the_whole_one() -> None:
    assert len(UPSTREAM) == 184 and OTHER_DEFAULTS.keys() <= {row["flag"] for row in UPSTREAM}
    sections_there = {row["section"] for row in UPSTREAM} - {"ConfigJsonUtils"}
    assert sections_there <= {section.__name__ for _, section in sections()}


@pytest.mark.parametrize("name", sorted({row["flag"] for row in UPSTREAM}))
def test_a_script_may_spell_out_the_default(name: str) -> None:
    """What the original does anyhow, said explicitly, starts without a word."""
    row = next(row for row in UPSTREAM if row["flag"] == name)
    if FLAGS[name].section != "launch" and name not in OTHER_DEFAULTS:
        given = Settings(given={name: Setting(upstream_default(row), "command line")})
        assert resolve(given).warnings == []


@pytest.mark.parametrize("flag", [flag for flag in FREE if flag.status == "accepted"], ids=lambda flag: flag.name)
def test_an_accepted_flag_starts_with_one_warning_that_says_why(flag: Flag) -> None:
    value = other_value(flag)
    (warning,) = resolve(Settings(given={flag.name: Setting(value, "command line")})).warnings
    assert warning.startswith(f"{flag.spell(value)} (command line) has no effect here: {flag.meta['why']}")


@pytest.mark.parametrize("flag", [f for f in FLAGS.values() if f.status == "unsupported"], ids=lambda flag: flag.name)
def test_an_unsupported_flag_is_refused_with_the_reason(flag: Flag) -> None:
    value = other_value(flag)
    with pytest.raises(ConfigError, match=re.escape(flag.meta["why"])) as caught:
        resolve(Settings(given={flag.name: Setting(value, "file f")}))
    assert f"{flag.spell(value)} (file f)" in str(caught.value) and caught.value.exit_code == 2


def other_value(flag: Flag) -> Any:
    """A value that asks for something."""
    if flag.kind == "bool":
        return not flag.default
    if flag.kind == "choice":
        return next(choice for choice in flag.choices if not flag.is_supported(choice) or choice != flag.default)
    if flag.kind == "str":
        return "x"
    numbers = (1.0, 2.0) if flag.kind == "float" else (1, 2, 3)
    return next(n for n in numbers if n != flag.default and (flag.status == "accepted" or not flag.is_supported(n)))
