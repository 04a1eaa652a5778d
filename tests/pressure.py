"""Programs of tests/test_pressure.py: an engine and a peer, real processes that share one memory cgroup.

python pressure.py peer      takes all but 90 MiB of what is free, again and again, until its input ends
python pressure.py engine    serves beside such a peer; prints a line of JSON
python pressure.py racer LOCK    takes pages until there are none, gives them back, for four seconds; prints JSON
"""

from __future__ import annotations

import json
import mmap
import select
import subprocess
import sys
import time
from pathlib import Path

MIB = 1 << 20
LEFT = 90 * MIB  # less than the host driver leaves free: beside it, no page can be created
HOLD_SECONDS, PAUSE_SECONDS = 0.08, 0.05
PAGE = 64 << 10
RACE_SECONDS = 4.0


def peer() -> None:
    from xllm_cli._vmm import host_memory

    while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        nbytes = max(0, host_memory()[1] - LEFT)
        if nbytes > mmap.PAGESIZE:
            with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE):
                time.sleep(HOLD_SECONDS)


def engine() -> None:
    from checkpoints import tiny_checkpoint

    from xllm_cli import LLM
    from xllm_cli.core import SamplingParams

    flags = {"dtype": "float32", "block_size": 16, "enable_vmm_kvcache": True, "vmm_elastic": True}
    flags |= {"host_page_mode": "4k", "phy_page_granularity_size": PAGE, "enable_prefix_cache": False}
    prompts = [[(17 * i + 3 * j) % 250 for j in range(300)] for i in range(24)]
    wanted = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with LLM(tiny_checkpoint("llama"), **flags) as llm:
        right = [answer.token_ids for answer in llm.generate(prompts, wanted)]
        neighbour = subprocess.Popen([sys.executable, __file__, "peer"], stdin=subprocess.PIPE)
        wrong = rounds = 0
        started = time.monotonic()
        while time.monotonic() - started < 30 and (rounds < 3 or not llm.snapshot.counters.map_failures):
            answers = llm.generate(prompts, wanted)
            llm.engine.check()
            wrong += [answer.token_ids for answer in answers] != right
            llm.engine.trim()
            llm.idle()
            rounds += 1
        neighbour.communicate(timeout=20)
        counters = llm.snapshot.counters
    print(
        json.dumps(
            {
                "rounds": rounds,
                "wrong": wrong,
                "map_failures": counters.map_failures,
                "preemptions": counters.preemptions,
                "peer": neighbour.returncode,
            }
        )
    )


def racer() -> None:
    from xllm_cli.vmm.driver import open_driver
    from xllm_cli.vmm.pool import PagePool

    driver = open_driver("cpu", mode="4k", page_bytes=PAGE)
    pool = PagePool(driver, page_bytes=PAGE, lock_path=Path(sys.argv[2]))
    taken: list[int] = []
    takes = misses = most = 0
    deadline = time.monotonic() + RACE_SECONDS
    while time.monotonic() < deadline:
        got = pool.take(1 + takes % 150, keep_free=160 * MIB)
        takes += 1
        taken += got or []
        most = max(most, len(taken))
        if got is None:
            misses += 1
            pool.give(taken)
            taken = []
            pool.trim()
    pool.give(taken)
    pool.close()
    print(json.dumps({"takes": takes, "misses": misses, "most": most * PAGE, "left": driver.usage()["handles"]}))


if __name__ == "__main__":
    {"peer": peer, "engine": engine, "racer": racer}[sys.argv[1]]()
