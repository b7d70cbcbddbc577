"""Attention of decode steps over paged keys and values."""

from .api import attention
from .heuristics import MAX_ROWS, Schedule, schedule_for
from .specs import attention_specs, decode_attention_specs

__all__ = ["MAX_ROWS", "Schedule", "attention", "attention_specs", "decode_attention_specs", "schedule_for"]
