"""Adapter files of every kind, read into one pair of tensors per site of the base."""

from hf_multilora.formats.base import (
    A_EACH,
    A_ONE,
    B_EACH,
    B_ONE,
    HALVES,
    LORA,
    SAVED,
    TOKENS,
    Adapter,
    AdapterError,
    ExpertsShape,
    LoraFactors,
    ModuleShape,
    Projection,
    is_lora,
    site_name,
    split_half,
    split_site,
)
from hf_multilora.formats.config import AUTO_CLASSES
from hf_multilora.formats.peft import adapter_from_tensors, read_adapter
from hf_multilora.formats.write import write_adapter

__all__ = [
    "AUTO_CLASSES",
    "A_EACH",
    "A_ONE",
    "B_EACH",
    "B_ONE",
    "HALVES",
    "LORA",
    "SAVED",
    "TOKENS",
    "Adapter",
    "AdapterError",
    "ExpertsShape",
    "LoraFactors",
    "ModuleShape",
    "Projection",
    "adapter_from_tensors",
    "is_lora",
    "read_adapter",
    "site_name",
    "split_half",
    "split_site",
    "write_adapter",
]
