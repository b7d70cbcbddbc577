"""Rotary position embedding of queries and keys, and keys and values into pages."""

from .specs import kv_append_spec

__all__ = ["kv_append_spec"]
