"""Checkpoints in Hugging Face's format: reading with checks, and writing."""

from .load import Report, inspect, load_module
from .save import save_module

__all__ = ["Report", "inspect", "load_module", "save_module"]
