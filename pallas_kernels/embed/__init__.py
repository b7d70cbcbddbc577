"""Rows of the embedding table by token."""

from .specs import embed_spec

__all__ = ["embed_spec"]
