"""The declarations: complete, consistent, and read back by the generators as they were written."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from xllm_cli.declare import closest, did_you_mean
from xllm_cli.flags import FLAGS, Config, LaunchConfig, sections

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
