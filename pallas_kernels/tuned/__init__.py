"""Tuned tiles: data by device and kernel source, found by shape and row bucket, refused with the reason when stale."""

from .lookup import Found, Refused, lookup
from .tiles import Chosen, choose, source_hash, tuned_tile_for

__all__ = ["Chosen", "Found", "Refused", "choose", "lookup", "source_hash", "tuned_tile_for"]
