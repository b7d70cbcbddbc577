"""Attention of decode steps over paged keys and values."""

from .heuristics import MAX_ROWS, Schedule, schedule_for
from .specs import attention_reference, attention_specs

__all__ = ["MAX_ROWS", "Schedule", "attention_reference", "attention_specs", "schedule_for"]
