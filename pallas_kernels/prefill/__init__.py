"""The experts' feed-forward block for many rows."""

from .heuristics import MatmulTile, PrefillTile, prefill_tile_for
from .reference import Plan
from .specs import MAX_PAIRS, combine_spec, down_spec, gate_up_spec, plan_specs

__all__ = [
    "MAX_PAIRS",
    "MatmulTile",
    "Plan",
    "PrefillTile",
    "combine_spec",
    "down_spec",
    "gate_up_spec",
    "plan_specs",
    "prefill_tile_for",
]
