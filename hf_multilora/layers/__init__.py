"""Adapted modules: one file per kind; importing the folder fills the registry in `base`."""

from . import embedding, linear
from .base import LoraLayer, require_free, unwrap, wrap
from .slots import ModuleSlots

__all__ = ["LoraLayer", "ModuleSlots", "embedding", "linear", "require_free", "unwrap", "wrap"]
