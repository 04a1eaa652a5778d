"""From what a client asked to what the engine is asked: one Request for each sequence. Knows nothing of HTTP."""

from __future__ import annotations

from typing import Any

from xllm_cli.core import Ready, Request, SamplingParams
from xllm_cli.errors import RequestError
from xllm_cli.server.constraints import constraint_of
from xllm_cli.server.detokenizer import TextOptions
from xllm_cli.server.protocol import ChatRequest, GenerationRequest
from xllm_cli.server.tokenizer import Tokenizer

COMPLETION_MAX_TOKENS = 16  # OpenAI's default, clipped to what is left of the context
MAX_SEQUENCES = 256


def make_requests(
    asked: GenerationRequest, prompts: list[list[int]], reply_id: str, ready: Ready, tokenizer: Tokenizer
) -> list[Request]:
    """Prompt-major: all choices of the first prompt, then of the second."""
    num_choices = asked.n or 1
    if len(prompts) * num_choices > MAX_SEQUENCES:
        raise RequestError(f"prompts times n is limited to {MAX_SEQUENCES}", code="invalid_value", param="n")
    requests: list[Request] = []
    for number, prompt in enumerate(prompts):
        _check_prompt(prompt, asked, ready)
        sampling = _sampling(asked, len(prompt), ready, tokenizer)
        requests.extend(
            Request(
                request_id=f"{reply_id}-{number * num_choices + choice}",
                prompt_ids=prompt,
                sampling=sampling,
                choice=choice,
                cache_salt=asked.cache_salt or "",
                priority=asked.rank,
                model=ready.model_id,
            )
            for choice in range(num_choices)
        )
    return requests


def _check_prompt(prompt: list[int], asked: GenerationRequest, ready: Ready) -> None:
    param = "messages" if isinstance(asked, ChatRequest) else "prompt"
    if not prompt:
        raise RequestError("the prompt has no tokens", code="empty_prompt", param=param)
    wanted = 1 if asked.token_limit is None else asked.token_limit
    if len(prompt) + wanted > ready.max_model_len:
        raise RequestError(
            f"the model's context is {ready.max_model_len} tokens; the request needs at least {len(prompt) + wanted}: "
            f"{len(prompt)} of the prompt and {wanted} to generate",
            code="context_length_exceeded",
            param=param,
        )
    if max(prompt) >= ready.vocab_size:
        raise RequestError(
            f"token ids must be below {ready.vocab_size}, the size of the vocabulary",
            code="invalid_prompt",
            param=param,
        )


def _sampling(asked: GenerationRequest, num_prompt: int, ready: Ready, tokenizer: Tokenizer) -> SamplingParams:
    limit = asked.token_limit
    if limit is None and not isinstance(asked, ChatRequest):
        left = min(ready.max_model_len, ready.capacity_tokens) - num_prompt
        limit = max(1, min(COMPLETION_MAX_TOKENS, left))
    min_tokens = asked.min_tokens or 0
    if limit is not None and min_tokens > limit:
        raise RequestError("min_tokens is larger than max_tokens", code="invalid_value", param="min_tokens")
    own_ends = tuple(sorted({*ready.eos_token_ids, *tokenizer.eos_token_ids}))
    ends = () if asked.ignore_eos else own_ends
    return SamplingParams(
        max_tokens=limit,
        min_tokens=min_tokens,
        temperature=1.0 if asked.temperature is None else float(asked.temperature),
        top_p=1.0 if asked.top_p is None else float(asked.top_p),
        top_k=max(0, asked.top_k or 0),
        seed=asked.seed,
        logprobs=asked.num_logprobs,
        stop_token_ids=tuple(sorted({*ends, *(asked.stop_token_ids or ())})),
        ignore_eos=bool(asked.ignore_eos),
        prompt_logprobs=asked.num_prompt_logprobs,
        grammar=constraint_of(asked, tokenizer, own_ends),
        **_changes(asked, ready),
    )


def _changes(asked: GenerationRequest, ready: Ready) -> dict[str, Any]:
    """The fields of SamplingParams that change logits."""
    biases = asked.biases
    if biases and biases[-1][0] >= ready.vocab_size:
        raise RequestError(
            f"logit_bias has token ids that are not below {ready.vocab_size}, the size of the vocabulary",
            code="invalid_value",
            param="logit_bias",
        )
    return {
        "min_p": float(asked.min_p or 0),
        "presence_penalty": float(asked.presence_penalty or 0),
        "frequency_penalty": float(asked.frequency_penalty or 0),
        "repetition_penalty": float(asked.repetition_penalty or 1),
        "logit_bias": biases,
    }


def text_options(asked: GenerationRequest, sampling: SamplingParams) -> TextOptions:
    """How the text of every choice is cut."""
    return TextOptions(
        stop=asked.stops,
        include_stop=bool(asked.include_stop_str_in_output),
        stop_token_ids=frozenset(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        skip_special_tokens=asked.skip_special_tokens is not False,
        echo=asked.echoes,
    )
