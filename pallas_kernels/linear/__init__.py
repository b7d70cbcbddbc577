"""Matmul of 1 to 64 rows with a weight matrix, with RMSNorm before and residual after."""

from .api import linear
from .heuristics import MAX_ROWS, Tile, tile_for
from .specs import linear_spec

__all__ = ["MAX_ROWS", "Tile", "linear", "linear_spec", "tile_for"]
