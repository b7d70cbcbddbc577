"""The routed expert block of a mixture-of-experts layer."""

from .activation import Activation, activate
from .api import explain, grouped_moe
from .weights import ExpertWeights, MoEConfig, SharedExpert, pack_experts

__all__ = [
    "Activation",
    "ExpertWeights",
    "MoEConfig",
    "SharedExpert",
    "activate",
    "explain",
    "grouped_moe",
    "pack_experts",
]
