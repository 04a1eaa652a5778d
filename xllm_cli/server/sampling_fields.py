"""The fields of a request that say how tokens are drawn, and their ranges. Knows neither prompts nor the engine."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_BIASES = 1024
MAX_BIAS = 100.0

Penalty = Annotated[float, Field(ge=-2, le=2)]


class SamplingFields(BaseModel):
    """Every generating route has them. None leaves the default: temperature 1, nothing cut off, nothing penalised."""

    model_config = ConfigDict(strict=True, extra="allow")

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None  # less makes logits overflow
    logit_bias: dict[str, float] | None = Field(None, description="token id → what is added to its logit, -100 … 100")

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is None:
            return value
        if len(value) > MAX_BIASES:
            raise ValueError(f"at most {MAX_BIASES} entries")
        if not all(token.isascii() and token.isdecimal() and len(token) < 10 for token in value):
            raise ValueError("the keys are token ids")
        if not all(-MAX_BIAS <= amount <= MAX_BIAS for amount in value.values()):
            raise ValueError(f"the values are numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        return value

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` by token id."""
        return tuple(sorted({int(token): float(amount) for token, amount in (self.logit_bias or {}).items()}.items()))
