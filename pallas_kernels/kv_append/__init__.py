"""Rotary position embedding of queries and keys, and keys and values into pages."""

from .api import kv_append
from .specs import kv_append_spec

__all__ = ["kv_append", "kv_append_spec"]
