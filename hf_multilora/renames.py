"""What modules were called in checkpoints of before: Transformers' own table, for the names in adapter files."""

from __future__ import annotations

import re
from typing import Any


def checkpoint_renames(model: Any) -> list[tuple[str, str]]:
    """Transformers' own renamings of this model's checkpoint keys: (regex, replacement), for names in adapter files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    mapping = getattr(model, "_checkpoint_conversion_mapping", None) or {}
    renames = list(mapping.items())
    for transform in get_model_conversion_mapping(model):
        if type(transform) is not WeightRenaming:  # its kin do more than to replace one name by another
            continue
        for source in transform.source_patterns:
            pattern, target = source.replace("*.", r".*\."), transform.target_patterns[0]
            if re.search(r"\w$", pattern):
                pattern += r"(?!\w)"  # `gate` is no part of `gate_proj`
            if transform.scope_prefix is not None:
                scope = "".join(f"{part}." for part in (transform.scope_prefix,) if part)
                outer = "".join(f"(?:{re.escape(part)}\\.)?" for part in (transform.base_model_prefix,) if part)
                within = "" if pattern.startswith("^") else ".*?"
                pattern = f"^({outer}{re.escape(scope)}{within})" + re.sub(r"\\1", r"\\2", pattern.removeprefix("^"))
                target = r"\1" + target.replace(r"\1", r"\2")
            renames.append((pattern, target))
    return renames
