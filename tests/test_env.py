"""`xllm env`: never fails for what is absent, says how to get it, and tells no secret."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from xllm_cli import facts
from xllm_cli.cli import main
from xllm_cli.commands import inspection
from xllm_cli.commands.inspection import Fact


def env(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["env", *arguments])
    return int(str(ended.value.code)), capsys.readouterr().out


def by_name(found: list[Fact]) -> dict[str, Fact]:
    return {fact.name: fact for fact in found}


def test_it_tells_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLLM_API_KEY", "hush")
    monkeypatch.setenv("XLLM_FLAG_PORT", "9")
    code, text = env(capsys)
    assert code == 0 and "hush" not in text
    for words in ("python ", "torch ", "kernel ", "host pages", "vm.max_map_count", "--device=auto", "XLLM_API_KEY"):
        assert words in text
    groups = json.loads(env(capsys, "--json")[1])
    assert list(groups) == ["software", "host", "limits", "devices", "variables"]
    assert {"name": "XLLM_FLAG_PORT", "value": "9", "fix": ""} in groups["variables"]


def test_a_device_that_is_none_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["env", "--device=tpu"])
    assert ended.value.code == 2
    assert "'tpu' is not one of 'npu', 'cuda', 'cpu'" in capsys.readouterr().err


def test_it_imports_no_torch() -> None:
    program = (
        "import sys; from xllm_cli.cli import main\n"
        "try: main(['env'])\n"
        "except SystemExit: print('torch' in sys.modules, file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stderr == "False\n"


def test_a_device_that_was_asked_for_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = env(capsys, "--device=cpu")
    assert code == 0 or "MISSING" in text
    assert "self-test of cpu" in text and "attention" in text


def test_an_npu_that_is_not_there_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if facts.is_there("npu"):
        pytest.skip("there is an NPU")
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    code, text = env(capsys, "--device=npu")
    assert code == 1 and "set_env.sh" in text and "pip install 'xllm[npu]'" in text
    npu = by_name(list(inspection.devices("")))["npu"]
    assert npu.fix == "" or "davinci" not in npu.fix  # nobody asked for one


def test_a_self_test_that_crashes_or_hangs_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho \'{"name":"page","value":"1","expected":"2","differs":true}\'\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert list(inspection.self_test("npu")) == [Fact("page", "1", "expected: 2")]
    program.write_text("#!/bin/sh\necho boom >&2\nkill -SEGV $$\n")
    (crash,) = inspection.self_test("npu")
    assert (crash.name, crash.value) == ("self-test", "boom") and "xllm_cli.worker.selftest --device=npu" in crash.fix
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(inspection, "SELF_TEST_SECONDS", 0.2)
    (hang,) = inspection.self_test("npu")
    assert "did not end within 0.2 s" in hang.value


def test_limits_that_are_too_low_come_with_the_command() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        few = by_name(list(inspection.limits()))["open files"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (few.value, few.fix.split(":")[0]) == ("512", "ulimit -n 65536")
    assert by_name(list(inspection.limits()))["open files"].fix == "" or soft < 1024
