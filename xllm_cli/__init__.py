"""xllm: an LLM inference server whose KV cache and weights live in virtual memory.

`LLM` is the in-process face of the engine; it is imported on first use because it brings torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xllm_cli.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from xllm_cli.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
