"""Routing: from router logits to experts and weights."""

from .api import route, route_rows, router_logits
from .config import RouterConfig, Routing

__all__ = ["RouterConfig", "Routing", "route", "route_rows", "router_logits"]
