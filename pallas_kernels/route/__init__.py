"""Routing: from router logits to experts and weights."""

from .api import route, router_logits
from .config import RouterConfig, Routing

__all__ = ["RouterConfig", "Routing", "route", "router_logits"]
