"""`xllm serve --device=npu` as its users meet it: real processes and HTTP, an emulated device under real torch_npu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from real_server import Serving

from npu.parity import GREEDY, NEAR, NUM_TOKENS, gaps, prompts_of
from npu.small_model import NUM_TENSORS
from xllm_cli import LLM
from xllm_cli.worker.npu_device import VISIBLE

pytestmark = [pytest.mark.npu, pytest.mark.server]
MIB = 1 << 20
HBM = 8 << 30  # of an emulated device
ROOT = Path(__file__).parents[2]
REPORT = "XLLM_ACL_EMULATOR_REPORT"


@pytest.fixture(scope="module")
def references() -> Iterator[None]:
    """Every engine started meanwhile computes with the references, see engine_site/."""
    before = os.environ.get("PYTHONPATH", "")
    paths = (Path(__file__).parent / "engine_site", ROOT / "tests", ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, paths), before])
    yield
    os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def serving(references: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A small elastic cache, with the vendor's allocator in expandable segments beside it; nothing may leak."""
    folder = tmp_path_factory.mktemp("serving")
    os.environ |= {REPORT: f"{folder}/report-%p.json", "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    made = Serving(
        folder, model, "--device=npu", "--dtype=float32", "--enable_vmm_kvcache=true", "--vmm_elastic=true",
        "--enable_vmm_weights=true", f"--max_cache_size={3 * NUM_TENSORS * 2}MiB",
    )  # fmt: skip
    del os.environ[REPORT], os.environ["PYTORCH_NPU_ALLOC_CONF"]
    yield made
    assert made.stop() == 0, made.log.read_text()
    for path in folder.glob("report-*.json"):  # an engine too slow to end on a busy machine is killed and leaves none
        report = json.loads(path.read_text())
        assert report["violations"] == []
        left = [one for one in report["live"]["reservations"] if one["bytes"] < HBM]
        assert left == [], "what is larger than the device belongs to torch_npu's segments, the rest was ours"


def test_answers_under_pressure_are_the_cpus_and_the_books_balance(serving: Serving, model: Path) -> None:
    prompts = prompts_of(7)
    with LLM(model, device="cpu", dtype="float32") as llm:
        expected = llm.generate(prompts, GREEDY)
    clear = [(p, answer.text) for p, answer in zip(prompts, expected, strict=True) if min(gaps(answer)) > 2 * NEAR]
    assert len(clear) >= 5
    with ThreadPoolExecutor(len(clear)) as threads:
        found = list(threads.map(lambda one: ask(serving, one[0]), clear))
    assert found == [text for _, text in clear]
    assert ask(serving, clear[-1][0]) == clear[-1][1]
    memory = serving.vmm()
    assert (memory["device"], memory["driver"], memory["page_bytes"]) == ("npu", "acl", 2 * MIB)
    assert memory["mapped"] == sum(memory[band] for band in ("kv_live", "kv_cached", "kv_idle", "kv_spare", "weights"))
    assert memory["preemptions_total"] > 0 and serving.metric("vllm:prefix_cache_hits_total") > 0


def test_models_sleep_wake_and_join_and_answer_the_same(serving: Serving, model: Path) -> None:
    prompt = prompts_of(1)[0]
    before, weights = ask(serving, prompt, count=6), serving.vmm()["weights"]
    assert weights > 0
    for body in ({"master_status": 1}, {"master_status": 2}, {"park": True}):
        assert serving.http.post("/sleep", json=body).status_code == 200
        assert serving.vmm()["weights"] == 0 and serving.http.post("/wakeup", json={}).status_code == 200
        assert ask(serving, prompt, count=6) == before
    assert serving.http.post("/fork_master", json={"model_path": str(model), "model_id": "twin"}).status_code == 200
    assert ask(serving, prompt, "twin", count=6) == before and serving.vmm()["weights"] == weights
    assert "the manual loader copied" in serving.log.read_text()


def ask(serving: Serving, prompt: list[int], model: str = "small", count: int = NUM_TOKENS) -> str:
    answer = serving.complete(model=model, prompt=prompt, max_tokens=count, ignore_eos=True)
    return answer["choices"][0]["text"]


def test_the_self_test_finds_nothing_wrong(references: None) -> None:
    command = [sys.executable, "-m", "xllm_cli.worker.selftest", "--device=npu"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    findings = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0, result.stdout + result.stderr
    names = ["attention", "attention on other pages", "attention in a window"]
    assert [one["name"] for one in findings][-3:] == names


@pytest.mark.parametrize("hidden", [{VISIBLE: "5"}, {"LD_LIBRARY_PATH": ""}], ids=["no device", "no library"])
def test_without_a_device_the_start_ends_with_1_and_one_sentence(model: Path, hidden: dict[str, str]) -> None:
    command = [sys.executable, "-m", "xllm_cli.cli", "serve", f"--model={model}", "--device=npu", "--port=0"]
    command += ["--enable_vmm_kvcache=true", "--vmm_elastic=true", "--host=127.0.0.1"]
    environment = {**os.environ, **hidden}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    last = (result.stdout + result.stderr).splitlines()[-1]
    assert result.returncode == 1 and "set_env.sh" in last and "--device=cpu" in last, result.stderr
