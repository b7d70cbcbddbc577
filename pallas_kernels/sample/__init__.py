"""The next token of each row, with a generator that does not know its batch."""

from .api import sample
from .heuristics import Cut, cut_for
from .specs import sample_specs

__all__ = ["Cut", "cut_for", "sample", "sample_specs"]
