"""Each rule on both sides of its limit, and what a message must hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xllm_cli.facts import Facts
from xllm_cli.flags import FLAGS, Config
from xllm_cli.rules import RULES, Case
from xllm_cli.verdict import broken_rules, problems, smallest_fix, unbuilt, warnings

KV = {"enable_vmm_kvcache": True}
WEIGHTS = {"enable_vmm_weights": True, "vmm_elastic": True}
HYBRID = Facts(is_hybrid=True)
MTP = {"num_speculative_tokens": 3}
PD = {"enable_disagg_pd": True}
SMALL_PAGES = {"phy_page_granularity_size": 2**16}

BROKEN: list[tuple[str, dict[str, Any], Facts]] = [
    ("R2", WEIGHTS | {"backend": "vlm"}, Facts()),
    ("R2", WEIGHTS | {"backend": "dit"}, Facts()),
    ("R2", WEIGHTS | {"model": "/m"}, Facts(backend="vlm")),
    ("R2", WEIGHTS | {"model": "/m"}, Facts(backend="dit")),
    ("R3", {"enable_vmm_weights": True}, Facts()),
    ("R6", KV | {"enable_task_pipeline": True}, Facts()),
    ("R6", MTP | {"enable_task_pipeline": True}, Facts()),
    ("R7", WEIGHTS | {"draft_model": "/d"}, Facts()),
    ("R7", WEIGHTS | KV | {"draft_model": "/d"}, Facts()),
    ("R7", WEIGHTS, HYBRID),
    ("R7", WEIGHTS | KV, HYBRID),
    ("R8", KV | {"speculative_algorithm": "Eagle3"}, Facts()),
    ("R8", KV | {"speculative_algorithm": "Eagle3", "model": "/m", "draft_model": "/m/"}, Facts()),
    ("R9", KV | MTP | PD, Facts()),
    ("R9", KV | MTP | PD | {"speculative_algorithm": "Suffix"}, Facts()),
    ("R10", KV | {"kv_cache_dtype": "int8"}, Facts()),
    ("R10", KV | {"kv_cache_dtype": "fp8"}, Facts()),
    ("R10", KV | {"indexer_cache_dtype": "int8"}, Facts()),
    ("R10", KV | {"indexer_cache_dtype": "fp8"}, Facts()),
    ("R11", KV | {"host_blocks_factor": 1.1}, Facts()),
    ("R11", KV | {"enable_kvcache_store": True}, Facts()),
    ("R12", KV | PD | {"vmm_elastic": True}, Facts()),
    ("R12", KV | PD | {"vmm_elastic": True, "max_memory_utilization": 0.5}, Facts()),
    ("R12", KV | PD | {"max_memory_utilization": 0.0, "max_cache_size": 1}, Facts()),
    ("R12", WEIGHTS | PD, Facts()),
    ("R13", {"max_memory_utilization": 0.0}, Facts()),
    ("R13", {"max_memory_utilization": 0.0, "vmm_elastic": True}, Facts()),
    ("R13", KV | {"max_memory_utilization": 0.0}, Facts()),
    ("R13", WEIGHTS | {"max_memory_utilization": 0.0}, Facts()),
    ("R15", KV, Facts(drivers=frozenset())),
    ("R15", WEIGHTS | {"device": "npu"}, Facts()),
    ("R15", KV | {"device": "cuda"}, Facts()),
    ("R16", {"max_tokens_per_chunk_for_prefill": 200}, HYBRID),
    ("R16", {"max_tokens_per_chunk_for_prefill": 24, "block_size": 16}, HYBRID),
    ("R17", {"device": "npu", "block_size": 64}, Facts()),
    ("R17", {"block_size": 256}, Facts(auto="npu")),
    ("C1", KV | SMALL_PAGES | {"device": "npu"}, Facts(drivers=frozenset({"npu"}))),
    ("C2", SMALL_PAGES | {"host_page_mode": "huge"}, Facts()),
    ("C3", {"node_rank": 1}, Facts()),
    ("C3", {"node_rank": 4, "nnodes": 4}, Facts()),
]
HELD: list[tuple[str, dict[str, Any], Facts]] = [
    ("R2", WEIGHTS | {"backend": "llm"}, Facts(backend="vlm")),
    ("R2", WEIGHTS, Facts(backend="llm")),
    ("R2", KV | {"backend": "vlm"}, Facts(backend="vlm")),
    ("R3", WEIGHTS, Facts()),
    ("R3", KV | {"enable_vmm_weights": True}, Facts()),
    ("R6", {"enable_task_pipeline": True}, Facts()),
    ("R6", KV | MTP | {"enable_task_pipeline": False}, Facts()),
    ("R6", {"enable_task_pipeline": True, "num_speculative_tokens": 3, "speculative_algorithm": "Suffix"}, Facts()),
    ("R7", KV | {"draft_model": "/d"}, HYBRID),
    ("R7", WEIGHTS | MTP, Facts()),
    ("R8", {"speculative_algorithm": "Eagle3"}, Facts()),
    ("R8", KV | {"speculative_algorithm": "Eagle3", "model": "/m", "draft_model": "/d"}, Facts()),
    ("R8", KV | MTP, Facts()),
    ("R9", MTP | PD, Facts()),
    ("R9", KV | MTP, Facts()),
    ("R9", KV | PD, Facts()),
    ("R10", {"kv_cache_dtype": "int8", "indexer_cache_dtype": "fp8"}, Facts()),
    ("R10", KV | {"kv_cache_dtype": "bfloat16"}, Facts()),
    ("R11", {"host_blocks_factor": 2.0, "enable_kvcache_store": True}, Facts()),
    ("R11", KV | {"host_blocks_factor": 1.0}, Facts()),
    ("R12", KV | PD, Facts()),
    ("R12", PD | {"vmm_elastic": True, "max_memory_utilization": 0.0, "max_cache_size": 1}, Facts()),
    ("R13", {"max_memory_utilization": 0.0, "max_cache_size": 1}, Facts()),
    ("R13", KV | {"max_memory_utilization": 0.0, "vmm_elastic": True}, Facts()),
    ("R13", {"max_memory_utilization": 0.01}, Facts()),
    ("R13", KV, Facts()),
    ("R15", KV, Facts()),
    ("R15", KV | {"device": "npu"}, Facts(drivers=frozenset({"npu"}))),
    ("R15", {"device": "npu"}, Facts()),
    ("R16", {"max_tokens_per_chunk_for_prefill": 256}, HYBRID),
    ("R16", {"max_tokens_per_chunk_for_prefill": 200, "enable_prefix_cache": False}, HYBRID),
    ("R16", {"max_tokens_per_chunk_for_prefill": 200}, Facts()),
    ("R16", {}, HYBRID),
    ("R17", {"device": "npu"}, Facts()),
    ("R17", {"device": "cpu", "block_size": 64}, Facts()),
    ("C1", SMALL_PAGES | {"device": "npu"}, Facts()),
    ("C1", KV | SMALL_PAGES, Facts()),
    ("C2", SMALL_PAGES, Facts()),
    ("C2", {"host_page_mode": "huge", "phy_page_granularity_size": 2**22}, Facts()),
    ("C3", {"node_rank": 0}, Facts()),
    ("C3", {"node_rank": 3, "nnodes": 4}, Facts()),
]


def case(flags: dict[str, Any], facts: Facts) -> Case:
    return Case(Config(), facts).changed(flags)


@pytest.mark.parametrize(("name", "flags", "facts"), BROKEN)
def test_broken(name: str, flags: dict[str, Any], facts: Facts) -> None:
    broken = [rule for rule in broken_rules(case(flags, facts)) if rule.name == name]
    assert len(broken) == 1
    for flag in broken[0].flags:
        assert f"--{flag}" in "\n".join(problems(case(flags, facts)))


@pytest.mark.parametrize(("name", "flags", "facts"), HELD)
def test_held(name: str, flags: dict[str, Any], facts: Facts) -> None:
    assert name not in [rule.name for rule in broken_rules(case(flags, facts))]


def test_every_refusal_has_both_sides_here() -> None:
    names = {rule.name for rule in RULES if not rule.is_warning}
    assert names == {name for name, _, _ in BROKEN} == {name for name, _, _ in HELD}
    specified = {name for name in names if name.startswith("R")}
    assert specified == {"R2", "R3", *(f"R{number}" for number in (6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17))}


@pytest.mark.parametrize(
    ("name", "flags", "warned"),
    [
        ("R1", {**WEIGHTS, "enable_manual_loader": False}, True),
        ("R1", {**WEIGHTS, "enable_manual_loader": True}, False),
        ("R1", WEIGHTS, False),
        ("R1", KV | {"enable_manual_loader": False}, False),
        ("R5", KV | {"enable_service_routing": True}, True),
        ("R5", {"enable_service_routing": True}, False),
        ("R14", {"vmm_elastic": True}, True),
        ("R14", KV | {"vmm_elastic": True}, False),
        ("R14", WEIGHTS, False),
        ("C4", KV | {"vmm_memory_reserve_bytes": 1}, True),
        ("C4", KV | {"vmm_elastic": True, "vmm_memory_reserve_bytes": 1}, False),
        ("C5", {"enable_chunked_prefill": False, "max_tokens_per_chunk_for_prefill": 64}, True),
        ("C5", {"enable_chunked_prefill": False}, False),
        ("C6", {"enable_in_batch_prefix_cache": True, "enable_prefix_cache": False}, True),
        ("C6", {"enable_in_batch_prefix_cache": True}, False),
        ("C7", {"auto_wake": True}, True),
        ("C7", {"auto_sleep": True}, True),
        ("C7", {"sleep_idle_seconds": 1.0}, True),
        ("C7", WEIGHTS | {"auto_wake": True, "auto_sleep": True, "sleep_idle_seconds": 1.0}, False),
    ],
)
def test_warning(name: str, flags: dict[str, Any], warned: bool) -> None:
    lines = [line for line in warnings(case(flags, Facts())) if line.startswith(f"{name}:")]
    assert len(lines) == warned


def test_a_flag_without_effect_is_warned_of_once() -> None:
    assert len(warnings(case({"enable_service_routing": True}, Facts()))) == 1
    assert len(warnings(case(KV | {"enable_service_routing": True}, Facts()))) == 1
    assert "one after the other" in warnings(case({"enable_schedule_overlap": True}, Facts()))[0]
    assert not warnings(Case(Config()))


def test_a_message_names_values_sources_and_the_smallest_change() -> None:
    broken = Case(case({"enable_vmm_weights": True}, Facts()).config, Facts(), {"enable_vmm_weights": "file f.json"})
    line = problems(broken)[0]
    assert line.startswith("R3: --enable_vmm_weights=true (file f.json), --enable_vmm_kvcache=false (default), ")
    assert line.endswith("Fix: --vmm_elastic=true")


def test_what_is_not_built_is_told_apart_from_broken_rules() -> None:
    drawn = case({"enable_vmm_weights": True, "num_speculative_tokens": 2}, Facts())
    assert [line[:3] for line in problems(drawn)] == ["R3:"]
    (draft,) = unbuilt(drawn)
    assert draft.startswith("--num_speculative_tokens=2 (fix) is not supported yet: ")
    assert draft.endswith(". Fix: --num_speculative_tokens=0")


def test_flags_of_one_reason_share_a_line() -> None:
    drawn = case({"dit_debug_print": True, "max_requests_per_batch": 2, "output_rec_logprobs": True}, Facts())
    assert problems(drawn) == [
        "--max_requests_per_batch=2 (fix), --dit_debug_print=true (fix) are not supported: diffusion models are not "
        "served. Fix: --max_requests_per_batch=1 --dit_debug_print=false",
        "--output_rec_logprobs=true (fix) is not supported: recommendation models are not served. "
        "Fix: --output_rec_logprobs=false",
    ]
    (line,) = warnings(case({"v": 1, "logtostderr": True}, Facts()))
    assert line.startswith("--v=1 (fix), --logtostderr=true (fix) have no effect here: --log_level")


def test_a_flag_of_another_device_is_warned_of() -> None:
    (line,) = warnings(case({"enable_graph": True, "max_tokens_for_graph_mode": 1}, Facts()))
    assert line.endswith(" have no effect here: the device is cpu, and this is for npu")
    assert not warnings(case({"enable_graph": True, "device": "npu"}, Facts()))
    (line,) = warnings(case({"host_page_mode": "4k"}, Facts(auto="npu")))
    assert line == "--host_page_mode=4k (fix) has no effect here: the device is npu, and this is for cpu"


def test_what_is_unset_by_default_is_to_be_left_out() -> None:
    (line,) = unbuilt(case({"nnodes": 3, "node_rank": 2}, Facts()))
    assert line.endswith("Fix: --nnodes=1 and leave out --node_rank")


def test_the_older_name_of_the_switches_points_to_both() -> None:
    (line,) = problems(case({"enable_xtensor": True}, Facts()))
    assert line.endswith("Fix: --enable_vmm_kvcache=true, and --enable_vmm_weights=true for the weights")
    assert not problems(case({"enable_xtensor": False}, Facts()))


@pytest.mark.parametrize(("name", "flags", "facts"), BROKEN)
def test_following_the_advice_ends_without_broken_rules(name: str, flags: dict[str, Any], facts: Facts) -> None:
    current, steps = case(flags, facts), 0
    while broken := broken_rules(current):
        mended = current.changed(smallest_fix(broken[0], current))
        assert not broken[0].broken(mended)
        current, steps = mended, steps + 1
        assert steps <= 4
    assert steps >= 1


def test_a_fix_that_would_break_another_rule_is_passed_over() -> None:
    weights_and_pd = case(WEIGHTS | PD, Facts())
    rule = next(rule for rule in RULES if rule.name == "R12")
    assert smallest_fix(rule, weights_and_pd) == {"enable_disagg_pd": False}  # vmm_elastic=false would break R3


def draws() -> st.SearchStrategy[dict[str, Any]]:
    """Values of every flag that a rule names, near the limits."""
    values: dict[str, Any] = {
        name: [True, False] for rule in RULES for name in rule.flags if FLAGS[name].kind == "bool"
    }
    values |= {name: FLAGS[name].choices for rule in RULES for name in rule.flags if FLAGS[name].choices}
    values |= {"model": ["/m"], "draft_model": ["", "/m", "/d"], "num_speculative_tokens": [0, 3]}
    values |= {"host_blocks_factor": [0.0, 1.0, 2.0], "max_memory_utilization": [None, 0.0, 0.5, 1.0]}
    values |= {"max_cache_size": [0, 1], "block_size": [16, 128], "max_tokens_per_chunk_for_prefill": [None, 16, 200]}
    values |= {"phy_page_granularity_size": [2**16, 2**21], "nnodes": [1, 2], "node_rank": [None, 0, 1, 2]}
    values |= {"vmm_memory_reserve_bytes": [0, 1]}
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(v) for name, v in values.items()})


def breaks_specification(c: Config, facts: Facts) -> bool:
    """The refusals of the specification written a second time, from its text."""
    kv, weights, elastic = c.vmm.enable_vmm_kvcache, c.vmm.enable_vmm_weights, c.vmm.vmm_elastic
    spec, ratio = c.speculative, c.kv_cache.max_memory_utilization
    effective = ratio if ratio is not None else (0.0 if kv and elastic else 0.8)
    device = facts.auto if c.model.device == "auto" else c.model.device
    speculates, is_fixed_or_physical = spec.num_speculative_tokens > 0, not elastic or not kv
    chunk = c.scheduler.max_tokens_per_chunk_for_prefill if c.scheduler.enable_chunked_prefill else None
    is_mtp = spec.speculative_algorithm == "MTP"
    has_small_pages = c.kv_cache.phy_page_granularity_size < 2**21
    quantized = {c.kv_cache.kv_cache_dtype, c.kv_cache.indexer_cache_dtype} & {"int8", "fp8"}
    return any(
        [
            weights and ((c.model.backend or facts.backend or "llm") != "llm"),
            weights and not kv and not elastic,
            c.scheduler.enable_task_pipeline and (kv or (is_mtp and speculates)),
            weights and (facts.is_hybrid or spec.draft_model != ""),
            kv and spec.speculative_algorithm == "Eagle3" and spec.draft_model in ("", c.model.model),
            kv and speculates and c.disagg.enable_disagg_pd,
            kv and quantized,
            kv and (c.kv_store.host_blocks_factor > 1 or c.kv_store.enable_kvcache_store),
            c.disagg.enable_disagg_pd and (kv or weights) and (elastic or effective == 0),
            effective == 0 and c.kv_cache.max_cache_size == 0 and is_fixed_or_physical,
            (kv or weights) and device not in facts.drivers,
            facts.is_hybrid and c.kv_cache.enable_prefix_cache and chunk and chunk % c.kv_cache.block_size != 0,
            device == "npu" and c.kv_cache.block_size != 128,
            has_small_pages and ((device != "cpu" and (kv or weights)) or c.host.host_page_mode == "huge"),
            (c.distributed.node_rank or 0) >= c.distributed.nnodes,
        ]
    )


FACTS = st.builds(
    Facts,
    drivers=st.sampled_from([frozenset({"cpu"}), frozenset({"cpu", "npu"}), frozenset[str]()]),
    auto=st.sampled_from(["cpu", "npu"]),
    backend=st.sampled_from([None, "llm", "vlm"]),
    is_hybrid=st.booleans(),
)


@given(draws(), FACTS)
def test_a_configuration_is_refused_exactly_when_the_specification_says_so(flags: dict[str, Any], facts: Facts) -> None:
    drawn = case(flags, facts)
    assert bool(broken_rules(drawn)) == breaks_specification(drawn.config, facts)


@given(draws(), FACTS)
def test_any_advice_mends_its_rule(flags: dict[str, Any], facts: Facts) -> None:
    drawn = case(flags, facts)
    for rule in broken_rules(drawn):
        assert not rule.broken(drawn.changed(smallest_fix(rule, drawn)))
