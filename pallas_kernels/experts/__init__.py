"""The experts' feed-forward block for 1 to 64 rows."""

from .heuristics import MAX_ROWS, Tile, tile_for
from .specs import expert_ffn_spec

__all__ = ["MAX_ROWS", "Tile", "expert_ffn_spec", "tile_for"]
