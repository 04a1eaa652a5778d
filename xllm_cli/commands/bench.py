"""`xllm bench`: measurements, in xllm_cli/bench/."""

from __future__ import annotations

from xllm_cli.bench.serve import group as command

__all__ = ["command"]
