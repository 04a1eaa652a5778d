"""The reader of arguments: spellings, mistakes, foreign names. test_spellings.py has the specification's table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xllm_cli.argv import canonical
from xllm_cli.flags import FLAGS
from xllm_cli.foreign_names import FOREIGN

SPELLINGS = [
    (["--enable_vmm_kvcache=true"], ["--enable_vmm_kvcache=true"]),
    (["--enable_vmm_kvcache=T"], ["--enable_vmm_kvcache=T"]),
    (["--enable-vmm-kvcache=on"], ["--enable_vmm_kvcache=on"]),
    (["--enable_vmm-kvcache"], ["--enable_vmm_kvcache=true"]),
    (["--enable_vmm_kvcache", "true"], ["--enable_vmm_kvcache=true"]),
    (["--enable_vmm_kvcache", "false"], ["--enable_vmm_kvcache=false"]),
    (["--enable_vmm_kvcache", "--port", "9000"], ["--enable_vmm_kvcache=true", "--port=9000"]),
    (["--noenable_vmm_kvcache"], ["--enable_vmm_kvcache=false"]),
    (["--no-enable-vmm-kvcache"], ["--enable_vmm_kvcache=false"]),
    (["--no_enable_vmm_kvcache"], ["--enable_vmm_kvcache=false"]),
    (["-port=9000"], ["--port=9000"]),
    (["--start-port", "9000"], ["--port=9000"]),
    (["-enable_vmm_kvcache=true"], ["--enable_vmm_kvcache=true"]),
    (["--model_id", "a-b_c"], ["--model_id=a-b_c"]),
    (["--model=a=b"], ["--model=a=b"]),
    (["--random_seed", "-1"], ["--random_seed=-1"]),
    (["--host="], ["--host="]),
    (["--host", "", "--port=1"], ["--host=", "--port=1"]),
    ([" ", "--port=1", "", "  "], ["--port=1"]),
    (["--port", " ", "1"], ["--port=1"]),
    (["/models/x"], ["--model=/models/x"]),
    (["--port=1", "--", "-odd-folder"], ["--port=1", "--model=-odd-folder"]),
    (["--enable_vmm_kvcache", "/models/x"], ["--enable_vmm_kvcache=true", "--model=/models/x"]),
    (["--print_config"], ["--print_config=true"]),
    (["--print_config", "/models/x"], ["--print_config=true", "--model=/models/x"]),
    (["--print_config=sources"], ["--print_config=sources"]),
    (["--nnodes", "1", "--node_rank", "0"], ["--nnodes=1", "--node_rank=0"]),
    (["-h"], ["--help=short"]),
    (["--help=vmm"], ["--help=vmm"]),
    (["--helpfull"], ["--help=all"]),
    (["--helpshort"], ["--help=short"]),
]


@pytest.mark.parametrize(("tokens", "expected"), SPELLINGS)
def test_spelling(tokens: list[str], expected: list[str]) -> None:
    assert canonical(tokens) == (expected, [], [])


MISTAKES = [
    (["--model=M", "--enable_vmm_kvcache", "/models/x"], ["unexpected argument '/models/x'"]),
    (["/models/x", "/models/y"], ["'/models/x'", "'/models/y'"]),
    (["--", "a", "b"], ["'a'", "'b'"]),
    (["--noenable_vmm_kvcache=true"], ["negated form takes no value"]),
    (["--noport"], ["only true/false flags"]),
    (["--enable_vmm_kvcahe=true"], ["did you mean --enable_vmm_kvcache"]),
    (["--max_mem=0.5"], ["no such flag --max_mem", "--max_memory_utilization"]),
    (["--mode=x"], ["no such flag --mode", "--model"]),
    (["--zzz", "value"], ["no such flag --zzz"]),
    (["---port=1"], ["no such flag ---port"]),
    (["-p", "1"], ["no such flag -p"]),
    (["--gpu_memory_utilization=0.9"], ["use --max_memory_utilization"]),
    (["--tensor-parallel-size", "2"], ["--tp_size", "--nnodes"]),
    (["-tp", "2"], ["--tp_size"]),
    (["--served-model-name", "x"], ["use --model_id"]),
    (["--mem-fraction-static=0.9"], ["use --max_memory_utilization"]),
    (["--max-model-len", "9"], ["no equivalent"]),
    (["--enable_kvcache_vmm"], ["--enable_vmm_kvcache"]),
    (["--fromenv=port"], ["not supported"]),
    (["--host 127.0.0.1"], ["'--host 127.0.0.1'", "as two arguments or with ="]),
    (["--port"], ["--port needs a value: an integer from 0 to 65535"]),
    (["--port", "--host=x"], ["--port needs a value"]),
    (["--port=9000\r"], ["'--port=9000\\r'", "Windows"]),
    (["--port", "9000\r"], ["'9000\\r'", "Windows"]),
    (["\r"], ["Windows"]),
    (["--", "folder\r"], ["'folder\\r'", "Windows"]),
    (["\u2013enable_vmm_kvcache"], ["looks like a dash but is U+2013"]),
    (["-\u2014port=1"], ["U+2014"]),
    (["\uff0d\uff0dport=1"], ["U+FF0D"]),
]


@pytest.mark.parametrize(("tokens", "said"), MISTAKES)
def test_mistake(tokens: list[str], said: list[str]) -> None:
    errors = "\n".join(canonical(tokens).errors)
    assert all(words in errors for words in said), errors


def test_every_mistake_is_reported_at_once() -> None:
    errors = canonical(["--prot=1", "-tp", "2", "--host 1", "--port=1", "/a", "/b"]).errors
    assert len(errors) == 5


def test_the_last_of_a_repeated_flag_wins_with_one_warning() -> None:
    argv, warnings, errors = canonical(["--port=1", "--block_size=16", "--port", "2", "--block_size=16"])
    assert argv == ["--port=2", "--block_size=16"] and not errors
    assert len(warnings) == 1 and "'1'" in warnings[0] and "'2'" in warnings[0]


def test_foreign_names_are_not_ours_and_point_to_flags_that_exist() -> None:
    assert not set(FOREIGN) & set(FLAGS)
    named = {word.strip(":,();") for text in FOREIGN.values() for word in text.split() if word.startswith("--")}
    assert named and {name.removeprefix("--").partition("=")[0] for name in named} <= set(FLAGS)


@given(st.lists(st.text(max_size=12) | st.sampled_from(["--port", "--vmm_elastic", "--", "true"]), max_size=6))
def test_no_tokens_break_the_reader_and_its_answer_is_canonical(tokens: list[str]) -> None:
    argv, _, errors = canonical(tokens)
    assert errors or canonical(argv) == (argv, [], [])


def test_the_names_of_others_are_many_and_each_is_answered_once() -> None:
    assert len(FOREIGN) > 150
    for name, advice in FOREIGN.items():
        (error,) = canonical([f"--{name.replace('_', '-')}=1"]).errors
        assert error == f"--{name.replace('_', '-')}: {advice}"
