"""What one request tells of its life."""

from __future__ import annotations

import time

from xllm_cli.cache.blocks import BlockTable
from xllm_cli.core import Request, SamplingParams, TokenLogprob
from xllm_cli.engine.sequence import Sequence


def test_only_the_first_output_tells_the_time_of_the_prefill() -> None:
    request = Request(request_id="r", prompt_ids=[1, 2], sampling=SamplingParams())
    sequence = Sequence(1, request, BlockTable(), max_tokens=9, seed=0)
    sequence.admitted()
    time.sleep(0.02)
    sequence.admitted()  # again, after a preemption: the client has waited since the first time
    outputs = []
    for token in (5, 6):
        sequence.append(token)
        outputs.append(sequence.output([TokenLogprob(token, 0.0)]))
    assert outputs[0].prefill_seconds is not None and outputs[0].prefill_seconds >= 0.02
    assert outputs[1].prefill_seconds is None
