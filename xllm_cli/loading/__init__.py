"""Checkpoints on disk → named tensors. Knows file formats; knows no model."""

from xllm_cli.loading.checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
