"""Adapter files of every kind, read into one pair of factors per module."""

from hf_multilora.formats.base import (
    LORA,
    SAVED,
    TOKENS,
    Adapter,
    AdapterError,
    LoraFactors,
    ModuleShape,
    site_name,
    split_site,
)
from hf_multilora.formats.peft import adapter_from_tensors, read_adapter

__all__ = [
    "LORA",
    "SAVED",
    "TOKENS",
    "Adapter",
    "AdapterError",
    "LoraFactors",
    "ModuleShape",
    "adapter_from_tensors",
    "read_adapter",
    "site_name",
    "split_site",
]
