"""Adapted modules: one file per kind; importing the folder fills the registry in `base`."""

from . import embedding, linear, saved, tokens, whole
from .base import AdaptedLayer, require_free, unwrap, wrap
from .rows import SlotRows
from .saved import SavedSlots
from .slots import ModuleSlots
from .tokens import TokenSlots

__all__ = [
    "AdaptedLayer",
    "ModuleSlots",
    "SavedSlots",
    "SlotRows",
    "TokenSlots",
    "embedding",
    "linear",
    "require_free",
    "saved",
    "tokens",
    "unwrap",
    "whole",
    "wrap",
]
