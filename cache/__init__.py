"""Compiled executables under stable program keys."""

from .executables import Executables, ExecutableStats
from .keys import program_key

__all__ = ["ExecutableStats", "Executables", "program_key"]
