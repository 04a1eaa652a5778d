"""The requests of the OpenAI API: their fields and ranges. Knows nothing of bodies or of the engine's state."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from xllm_cli.errors import RequestError
from xllm_cli.server.parsing import unknown_fields
from xllm_cli.server.reasoning import OPEN
from xllm_cli.server.sampling_fields import SamplingFields
from xllm_cli.server.toolcalls import arguments_as_object
from xllm_cli.server.tools import ToolFields

MAX_STOPS = 16
MAX_CHOICES = 128
MAX_LOGPROBS = 20
_RANKS = {"HIGH": -1, "DEFAULT": 0, "NORMAL": 0, "LOW": 1}

_IDS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_ONE: dict[str, Any] = {"anyOf": [{"type": "string"}, _IDS]}
_PROMPT: dict[str, Any] = {"anyOf": [*_ONE["anyOf"], {"type": "array", "minItems": 1, "items": _ONE}]}

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class StreamOptions(BaseModel):
    """`include_usage` adds one last chunk with the usage; `continuous_usage_stats` adds it to every chunk."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(SamplingFields):
    """What completions and chat have in common."""

    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | Literal["DEFAULT", "HIGH", "NORMAL", "LOW"] | None = (
        Field(None, description="lower is sooner, HIGH is -1 and LOW is 1; used with --priority_strategy=priority")
    )
    response_format: dict[str, Any] | None = Field(None, description="text, json_object, json_schema, regex or lark")

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings")
        if any(not 1 <= len(stop) <= 1024 for stop in stops):
            raise ValueError("a stop string has 1 to 1024 characters")
        return value

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, one or many."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every chunk carries the usage."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def token_limit(self) -> int | None:
        """The explicit limit on new tokens, None when the client gave none; the newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def rank(self) -> int:
        """The priority as a number."""
        return _RANKS[self.priority] if isinstance(self.priority, str) else self.priority or 0

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to report with each token; None for no log probabilities at all."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As `num_logprobs`, for the tokens of the prompt."""
        return None

    @property
    def ignored_fields(self) -> list[str]:
        """Names this server does not know; odd ones, which no client means as a field, as `?`."""
        return unknown_fields(self.model_extra or ())


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Any = Field(
        description="a string, a list of strings, a list of token ids, or a list of such lists",
        json_schema_extra=_PROMPT,
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None

    @model_validator(mode="after")
    def _check_max_tokens(self) -> CompletionRequest:
        if self.token_limit == 0 and not self.echo:
            raise RequestError("max_tokens: 0 needs echo to be true", code="invalid_value", param="max_tokens")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def num_prompt_logprobs(self) -> int | None:
        # nothing to generate is nothing to wait for, so the prompt's numbers are asked for in any case
        return self.logprobs or 0 if self.echoes and (self.logprobs is not None or self.token_limit == 0) else None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt as text or token ids. RequestError on any other shape."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if _are_token_ids(prompt):
                return [prompt]
            if len(prompt) <= MAX_CHOICES and all(isinstance(p, str) or (_are_token_ids(p) and p) for p in prompt):
                return prompt
        raise RequestError(
            f"prompt must be a string, a list of strings, a list of token ids or up to {MAX_CHOICES} such lists",
            code="invalid_prompt",
            param="prompt",
        )


class ChatMessage(BaseModel):
    """One message; fields beyond role and content reach the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message with its text parts joined. RequestError when a part is not text."""
        extra = dict(self.model_extra or {})
        if isinstance(calls := extra.get("tool_calls"), list):
            extra["tool_calls"] = [arguments_as_object(call) if isinstance(call, dict) else call for call in calls]
        text = self._text()
        if text is None and not extra.get("tool_calls"):
            text = ""  # templates print None as a word
        return {**extra, "role": self.role, "content": text}

    def _text(self) -> str | None:
        if not isinstance(self.content, list):
            return self.content
        texts = [part.get("text") for part in self.content if part.get("type") == "text"]
        if len(texts) < len(self.content) or not all(isinstance(text, str) for text in texts):
            raise RequestError(
                "content parts must be text; other kinds need a multimodal model", code="unsupported", param="messages"
            )
        return "\n".join(text for text in texts if isinstance(text, str))


class ChatRequest(GenerationRequest, ToolFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    _starts_in_reasoning: bool = PrivateAttr(False)

    @model_validator(mode="after")
    def _check_continuation(self) -> ChatRequest:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self

    @property
    def starts_in_reasoning(self) -> bool:
        """Whether the prompt ends within a block of reasoning."""
        return self._starts_in_reasoning

    def rendered(self, prompt: str) -> None:
        """The prompt's text is known."""
        self._starts_in_reasoning = prompt.rstrip().endswith(OPEN)

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**31 for item in value)
