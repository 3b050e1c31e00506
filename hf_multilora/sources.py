"""What classes and functions say in their source, where nothing else tells what they do."""

from __future__ import annotations

import functools
import inspect
from typing import Any


@functools.cache
def source_of(what: Any) -> str:
    """Empty where there is none: nothing can be read from it."""
    try:
        return inspect.getsource(what)
    except (OSError, TypeError):
        return ""
