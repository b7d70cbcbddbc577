"""Rows grouped by expert, on the device."""

from .specs import block_count, plan_spec

__all__ = ["block_count", "plan_spec"]
