"""Record what transformers answers with SmolLM2-135M-Instruct: the oracle of the engine's parity test.

    .venv/bin/python tests/record_smollm2.py        # rewrites tests/data/smollm2_f32.json, about four minutes

float32, eager attention, greedy, one prompt at a time, no early end. Per prompt: its token ids, the 64 tokens, and the
gap between the best two logits at each step. The prompts are chosen so that every gap is above MIN_GAP, ten times the
noise that another order of float32 sums makes: a test can ask for equal tokens. Everything follows from the fetched
folder, whose weights' SHA-256 the file carries, and from the versions it names.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from xllm_cli.fetch import fetch

MODEL = "smollm2-135m-instruct"
TARGET = Path(__file__).parent / "data" / "smollm2_f32.json"
NUM_TOKENS = 64
MIN_GAP = 2e-3
QUESTIONS = [
    "What is the capital of France?",
    "Name a famous painter.",
    "How do plants make food from sunlight?",
    "Write one sentence about the sea.",
    "Who wrote Romeo and Juliet?",
    "What is 12 plus 30?",
    "Explain gravity to a child.",
    "List two uses of copper.",
    "Translate 'good morning' into Spanish.",
    "Give me a recipe for pancakes.",
    "What is the largest planet in the solar system?",
    "Why is the sky blue?",
    "Tell me a short joke about a cat.",
    "What does HTTP stand for?",
    "How many days are there in a leap year?",
    "Describe a rainy day in the city.",
]
TEXTS = [
    "The quick brown fox jumps over the lazy dog because",
    "Once upon a time, in a small village by the river, there lived",
    "def fibonacci(n):\n    ",
    "My favourite book is about",
    "In 1969, the first humans",
    "Water boils at 100 degrees Celsius, but on a high mountain",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, age FROM users WHERE",
    "A binary search works by",
    "The history of bread goes back",
    "1, 2, 4, 8, 16,",
    "import numpy as np\n\nx = np.arange(10)\nprint(x",
    "Photosynthesis is the process by which",
    "She opened the door slowly and saw",
    "The most important thing about learning a language is",
    "A page is the unit in which memory is mapped. A block is the unit in which tokens are cached. When the last block "
    "on a page is returned, the page is free again, and another program on the same machine can use it. This matters "
    "because a server that keeps all memory for itself",
]


def prompts(tokenizer: Any) -> list[list[int]]:
    """The 16 questions through the chat template and the 16 plain texts, as token ids."""
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in QUESTIONS
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in chats + TEXTS]


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> dict[str, Any]:
    """The next NUM_TOKENS likeliest tokens after `prompt` and the gap of the best two logits at each."""
    tokens: list[int] = []
    gaps: list[float] = []
    inputs, cache = torch.tensor([prompt]), None
    for _ in range(NUM_TOKENS):
        output = model(inputs, cache=cache, use_cache=True)
        best = output.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 4))
        inputs, cache = best.indices[:1].view(1, 1), output.cache
    return {"prompt_ids": prompt, "tokens": tokens, "gaps": gaps}


def main() -> None:
    """Write TARGET."""
    folder = fetch(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    sequences = [greedy(model, prompt) for prompt in prompts(tokenizer)]
    smallest = min(min(sequence["gaps"]) for sequence in sequences)
    if smallest <= MIN_GAP:
        raise SystemExit(f"a gap of {smallest} is too small to ask for equal tokens: replace that prompt")
    with (folder / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    facts = {
        "model": MODEL,
        "weights_sha256": digest,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "smallest_gap": smallest,
    }
    lines = ",\n".join(json.dumps(sequence, separators=(",", ":")) for sequence in sequences)
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(facts)[:-1] + f', "sequences": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
