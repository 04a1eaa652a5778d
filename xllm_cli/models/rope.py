"""Angles of rotary positions."""

from __future__ import annotations

import math

import torch

from xllm_cli.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions, [head_dim / 2] float32.

    llama3: wavelengths above original / low are stretched by `factor`, those below original / high kept, and in between
    the two are blended (transformers, modeling_rope_utils).
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / frequencies
        low, high = rope.low_freq_factor, rope.high_freq_factor
        blend = ((rope.original_max_positions / wavelength - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * frequencies / rope.factor + blend * frequencies
    return frequencies


def rope_table(rope: RopeConfig, head_dim: int, max_positions: int) -> torch.Tensor:
    """[max_positions, head_dim] float32: cosines of a position's angles, then their sines.

    Made once for all positions: a table computed in pieces need not have the same last bits.
    """
    angles = torch.arange(max_positions).float()[:, None] * inverse_frequencies(rope, head_dim)[None]
    return torch.cat([angles.cos(), angles.sin()], dim=1)
