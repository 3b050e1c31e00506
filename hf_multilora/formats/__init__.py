"""Adapter files of every kind, read into one pair of factors per module."""

from hf_multilora.formats.base import Adapter, AdapterError, LoraFactors, ModuleShape
from hf_multilora.formats.peft import adapter_from_tensors, read_adapter

__all__ = ["Adapter", "AdapterError", "LoraFactors", "ModuleShape", "adapter_from_tensors", "read_adapter"]
