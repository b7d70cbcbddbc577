"""The decode engine: whole decode steps of the built-in models as device graphs, over memory that it owns."""

from .engine import Engine

__all__ = ["Engine"]
