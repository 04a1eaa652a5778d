"""The self-test of a device: right on a device that works, and it names what a wrong one does."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
from paged import batch_of

from xllm_cli.errors import DeviceError
from xllm_cli.flags import Config
from xllm_cli.models.batch import Batch, LayerKV
from xllm_cli.models.ops.base import Heads, Ops
from xllm_cli.models.ops.cpu import CpuOps
from xllm_cli.vmm.driver import Driver, FaultyDriver, open_driver
from xllm_cli.worker import selftest
from xllm_cli.worker.backup import FileBackup
from xllm_cli.worker.cpu_device import CpuDevice
from xllm_cli.worker.selftest import Finding, examine

PAGE = 65536


class Host(CpuDevice):
    """The cpu with a driver and operators of a test's choice."""

    def __init__(self, driver: Driver | None = None, ops: Ops | None = None) -> None:
        super().__init__(Config())
        self.driver = driver or open_driver("cpu", mode="4k", page_bytes=PAGE)
        self._ops = ops or CpuOps()

    def open_driver(self) -> Driver:
        return self.driver

    def open_ops(self) -> Ops:
        return self._ops


class NextBlock(CpuOps):
    """Looks into the wrong block of every sequence: what a table in another order would do."""

    def attention(self, qkv: torch.Tensor, kv: LayerKV, batch: Batch, heads: Heads, **how: object) -> torch.Tensor:
        batch.block_tables = batch.block_tables.flip(1)
        return super().attention(qkv, kv, batch, heads, **how)


class WiderWindow(CpuOps):
    """Counts the tokens before the querying one, as some vendors do."""

    def attention(
        self, qkv: torch.Tensor, kv: LayerKV, batch: Batch, heads: Heads, *, scale: float, window: int | None
    ) -> torch.Tensor:
        return super().attention(qkv, kv, batch, heads, scale=scale, window=window and window + 1)


def differing(findings: Sequence[Finding]) -> list[str]:
    return [finding.name for finding in findings if finding.differs]


def test_a_working_device_differs_only_in_the_page_it_was_given() -> None:
    device = Host()
    findings = list(examine(device))
    assert differing(findings) == ["page bytes"]
    assert [f.name for f in findings if f.name.endswith("µs")] == [
        f"{verb} µs" for verb in ("create", "map", "fence", "unmap", "destroy")
    ]
    assert {f.name for f in findings} >= {"driver", "memory", "attention", "attention on other pages"}
    assert next(f.value for f in findings if f.name == "weights brought back").endswith("MiB/s, the same bytes")
    assert (device.driver.usage()["ranges"], device.driver.usage()["handles"]) == (0, 0)


def test_attention_over_the_wrong_blocks_is_seen() -> None:
    findings = list(examine(Host(ops=NextBlock())))
    assert differing(findings) == ["page bytes", "attention", "attention on other pages", "attention in a window"]


def test_weights_that_come_back_as_others_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileBackup, "fill", lambda self, chunk, offset: chunk.zero_())
    assert differing(list(examine(Host()))) == ["page bytes", "weights brought back"]


def test_a_window_that_is_a_token_too_wide_is_seen() -> None:
    findings = list(examine(Host(ops=WiderWindow())))
    assert differing(findings) == ["page bytes", "attention in a window"]


@pytest.mark.parametrize(
    ("verb", "nth", "name"),
    [("create", 3, "failure"), ("map", 40, "failure"), ("map", 3 * selftest.PAGES + 8, "attention")],
)
def test_a_driver_that_fails_is_a_finding_and_leaves_nothing(verb: str, nth: int, name: str) -> None:
    device = Host(FaultyDriver(open_driver("cpu", mode="4k", page_bytes=PAGE)))
    device.driver.fail(verb, nth, False)
    last = list(examine(device))[-1]
    assert (last.name, last.differs) == (name, True)
    assert (device.driver.usage()["ranges"], device.driver.usage()["handles"]) == (0, 0)


def test_the_batch_is_the_one_the_engine_would_build() -> None:
    rows = [([0] * new, length - new, list(blocks)) for length, new, blocks in selftest.SEQUENCES]
    expected, made = batch_of(rows, selftest.BLOCK_SIZE), selftest._batch(new_only=True)
    for name in ("positions", "query_starts", "context_lens", "block_tables", "slots"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name


def test_it_prints_json_and_tells_by_its_status(capfd: pytest.CaptureFixture[str], monkeypatch) -> None:
    def open_noisily(name: str, config: Config) -> Host:
        os.write(1, b"a vendor's banner\n")
        return Host()

    monkeypatch.setattr(selftest, "open_device", open_noisily)
    assert selftest.main(["--device=cpu"]) == 1
    said = capfd.readouterr()
    assert said.out.splitlines()[0] == '{"name":"driver","value":"host, mode 4k"}' and "banner" in said.err


def test_a_device_that_cannot_be_opened_is_said_in_one_line(capfd: pytest.CaptureFixture[str], monkeypatch) -> None:
    def refuse(name: str, config: Config) -> Host:
        raise DeviceError("no such thing")

    monkeypatch.setattr(selftest, "open_device", refuse)
    assert selftest.main(["--device=npu"]) == 1
    assert capfd.readouterr().out == '{"name":"device","value":"no such thing","differs":true}\n'
