"""Adapted modules: one file per kind; importing the folder fills the registry in `base`."""

from . import embedding, experts, gated, linear, local, outside, outside_experts, router, saved, sharded, tokens, whole
from .base import AdaptedLayer, require_free, unwrap, wrap
from .expert_slots import ExpertSlots
from .rows import SlotRows
from .saved import SavedSlots
from .slots import ModuleSlots
from .tokens import TokenSlots

__all__ = [
    "AdaptedLayer",
    "ExpertSlots",
    "ModuleSlots",
    "SavedSlots",
    "SlotRows",
    "TokenSlots",
    "embedding",
    "experts",
    "gated",
    "linear",
    "local",
    "outside",
    "outside_experts",
    "require_free",
    "router",
    "saved",
    "sharded",
    "tokens",
    "unwrap",
    "whole",
    "wrap",
]
