"""The next token of each row, with a generator that does not know its batch."""

from .specs import sample_specs

__all__ = ["sample_specs"]
