"""Adapter files of every kind, read into one pair of tensors per site of the base."""

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
from hf_multilora.formats.config import AUTO_CLASSES
from hf_multilora.formats.peft import adapter_from_tensors, read_adapter
from hf_multilora.formats.write import write_adapter

__all__ = [
    "AUTO_CLASSES",
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
    "write_adapter",
]
