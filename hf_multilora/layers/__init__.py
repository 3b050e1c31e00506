"""Adapted modules: one file per kind; importing the folder fills the registry in `base`."""

from . import embedding, linear
from .base import LoraLayer, unwrap, wrap
from .census import take_census
from .slots import ModuleSlots

__all__ = ["LoraLayer", "ModuleSlots", "embedding", "linear", "take_census", "unwrap", "wrap"]
