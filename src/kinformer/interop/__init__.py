"""Checkpoints of other libraries, read without running anything that they hold."""

from kinformer.interop.checkpoint import Imported, read_checkpoint

__all__ = ["Imported", "read_checkpoint"]
