"""Programs of tests/test_pressure.py: an engine and a peer, real processes that share one memory cgroup.

python pressure.py peer      takes all but 90 MiB of what is free, again and again, until its input ends
python pressure.py engine    serves beside such a peer; prints a line of JSON
"""

from __future__ import annotations

import json
import mmap
import select
import subprocess
import sys
import time

MIB = 1 << 20
LEFT = 90 * MIB  # less than the host driver leaves free: beside it, no page can be created
HOLD_SECONDS, PAUSE_SECONDS = 0.08, 0.05
PAGE = 64 << 10


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


if __name__ == "__main__":
    {"peer": peer, "engine": engine}[sys.argv[1]]()
