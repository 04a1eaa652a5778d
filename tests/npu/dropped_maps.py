"""Runs one load again and again, each time with another map call left out; prints which omissions nobody noticed.

    python dropped_maps.py MODEL_FOLDER

An omission is noticed when the process dies of touching a page that is not there, or when answers change. Each run is a
fork of a process that has imported everything and opened nothing.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Sequence
from typing import Any

import torch_npu  # noqa: F401 - loaded once, opened in each fork

from npu.dispatch import install
from npu.parity import prompts_of
from xllm_cli import LLM
from xllm_cli.core import SamplingParams
from xllm_cli.models import llama  # noqa: F401 - for the forks
from xllm_cli.models.ops import npu  # noqa: F401
from xllm_cli.vmm.driver import Driver, open_driver
from xllm_cli.worker import npu_device  # noqa: F401

FLAGS = {
    "enable_vmm_kvcache": True, "vmm_elastic": True, "enable_prefix_cache": False, "dtype": "float32",
    "max_cache_size": 48 << 20,
}  # fmt: skip


class OneMapLess:
    """A driver that leaves out the `missing`-th page that is to be mapped, and says it is there. 0 leaves out none."""

    def __init__(self, driver: Driver, missing: int) -> None:
        self._driver = driver
        self._missing = missing
        self._absent: set[int] = set()
        self.num_maps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def map(self, pages: Sequence[tuple[int, int]]) -> None:
        kept = []
        for address, handle in pages:
            self.num_maps += 1
            if self.num_maps == self._missing:
                self._absent.add(address)
            else:
                kept.append((address, handle))
        self._driver.map(kept)

    def unmap(self, addresses: Sequence[int]) -> list[int]:
        there = [address for address in addresses if address not in self._absent]
        self._absent.difference_update(addresses)
        return self._driver.unmap(there)


def answers(folder: str, missing: int) -> dict[str, Any]:
    """Tokens of a load that grows twice, and how many maps it took."""
    driver = OneMapLess(open_driver("npu"), missing)
    install()
    tokens = []
    wanted = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    with LLM(folder, device="npu", driver=driver, **FLAGS) as llm:
        for prompts in (prompts_of(2, 10), prompts_of(4, 120)):
            tokens += [answer.token_ids for answer in llm.generate(prompts, wanted)]
        return {"tokens": tokens, "maps": driver.num_maps}


def forked(folder: str, missing: int) -> dict[str, Any] | None:
    """The answers of a run in a fork; None if it did not live to tell."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = 1
        try:
            os.write(write, json.dumps(answers(folder, missing)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with open(read, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(told) if status == 0 else None


def main(folder: str) -> None:
    whole = forked(folder, 0)
    assert whole is not None, "the load fails with every page in place"
    unseen = []
    for missing in range(1, whole["maps"] + 1):
        less = forked(folder, missing)
        if less is not None and less["tokens"] == whole["tokens"]:
            unseen.append(missing)
    print(json.dumps({"maps": whole["maps"], "unseen": unseen}))


if __name__ == "__main__":
    main(sys.argv[1])
