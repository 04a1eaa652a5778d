"""The engine as a library: no server, the same flags as keyword arguments.

.venv/bin/python examples/llm_in_process.py "$(.venv/bin/xllm fetch smollm2-135m-instruct | tail -n 1)"
"""

from __future__ import annotations

import sys

from xllm_cli import LLM
from xllm_cli.core import SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "The opposite of hot is"]


def main(model: str) -> None:
    """Complete three prompts in one batch and show what the KV cache took of the memory."""
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    with LLM(model, enable_vmm_kvcache=True, vmm_elastic=True, max_cache_size=256 * 2**20) as llm:
        for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, sampling), strict=True):
            print(f"{prompt!r} -> {answer.text!r} ({answer.finish_reason})")
        memory = llm.memory()
        print(f"mapped {memory['mapped']}, of it cached prefixes {memory['kv_cached']}, page {memory['page_bytes']}")


if __name__ == "__main__":
    main(sys.argv[1])
