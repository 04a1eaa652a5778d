"""Help pages, and that the README's tables are the ones of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from xllm_cli import manual
from xllm_cli.flags import FLAGS, sections
from xllm_cli.rules import RULES

README = Path(__file__).parent.parent / "README.md"


def test_the_readme_is_fresh() -> None:
    text = README.read_text(encoding="utf-8")
    assert manual.refresh(text) == text, "run: xllm flags --write README.md"


def test_refresh_replaces_only_what_is_between_the_markers() -> None:
    once = manual.refresh("# title\n")
    stale = once.replace("`--port`", "`--prot`").replace("# title", "# other")
    assert manual.refresh(stale) == once.replace("# title", "# other")
    assert manual.refresh(once) == once and once.startswith("# title\n")


def test_tables_hold_every_flag_and_every_rule() -> None:
    assert all(f"| `--{name}` |" in manual.flags_table() for name in FLAGS)
    assert all(rule.limit in manual.limits_table() for rule in RULES)
    assert {row.split()[1] for row in manual.limits_table().splitlines()[2:]} == {rule.name for rule in RULES} | {"R4"}
    assert {f"R{n}" for n in range(1, 18)} <= {rule.name for rule in RULES} | {"R4"}


def test_short_help_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = manual.help_page("short").splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 80
    assert all(f"{section.__name__}," in " ".join(lines) for _, section in sections())
    for name in ("model", "port", "enable_vmm_kvcache", "vmm_elastic", "max_memory_utilization", "config_json_file"):
        assert f"--{name} " in "\n".join(lines)


@pytest.mark.parametrize("columns", ["20", "80", "200"])
def test_full_help_lists_every_flag_with_its_default_and_range(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    words = " ".join(manual.help_page("all").split())
    assert all(f" --{name} " in words for name in FLAGS)
    assert "an integer from 0 to 65535; default 8010" in words


def test_help_about_a_word() -> None:
    for topic in ("KVCacheConfig", "kv_cache"):
        page = manual.help_page(topic)
        assert "--block_size" in page and "--port" not in page
    assert "--enable_vmm_kvcache" in manual.help_page("vmm")
    assert manual.help_page("zebra") == "no flag is about 'zebra'"
    assert manual.help_page("enable-vmm-kvcahe").endswith("did you mean --help=enable_vmm_kvcache?")


def test_the_vmm_group_follows_the_common_ones() -> None:
    headings = re.findall(r"^(\w+Config): ", manual.help_page("all"), re.MULTILINE)
    assert headings[:4] == ["ServiceConfig", "SecurityConfig", "ModelConfig", "VmmConfig"]
    assert sorted(headings) == sorted([section.__name__ for _, section in sections()] + ["LaunchConfig"])
