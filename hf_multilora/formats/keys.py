"""Names in an adapter file: what a key says, and which module of the base it means."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hf_multilora.formats.base import AdapterError

# path components that training-time wrappers (torch.compile, FSDP, activation checkpointing) put into a key
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
PEFT_PREFIX = ("base_model", "model")
# component -> (factor, of an embedding?)
FACTORS = {
    "lora_A": ("a", False),
    "lora_B": ("b", False),
    "lora_embedding_A": ("a", True),
    "lora_embedding_B": ("b", True),
}
SHOWN = 5  # names listed in one error


def listed(names: Iterable[str]) -> str:
    """The first few names and how many more there are."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


@dataclass(frozen=True)
class ParsedKey:
    """One key of an adapter file.

    `role` is "a" or "b" (a factor), "copy" (a parameter of the base itself) or "other" (something no plain LoRA has).
    """

    key: str
    module: str  # as the file names it, without PEFT's prefix
    role: str
    embedding: bool = False
    adapter: str | None = None  # the adapter's name at training time, where the key still holds it
    parameter: str = ""  # copy: "weight" or "bias"


def parse_key(key: str) -> ParsedKey:
    """Split `key` into module, role and training-time adapter name.

    Accepted: with or without `base_model.model.`, wrapper components anywhere, `lora_A[.name].weight`,
    `lora_embedding_A[.name]`, and copies of base parameters `X.weight` / `X.base_layer.weight` (also bias).
    """
    parts = [part for part in key.split(".") if part not in WRAPPERS]
    if tuple(parts[:2]) == PEFT_PREFIX:
        parts = parts[2:]
    if not parts:
        return ParsedKey(key, "", "other")
    # the first one: an adapter may itself be called "lora_A"
    at = next((i for i, part in enumerate(parts) if part in FACTORS), None)
    if at is not None:
        module, rest = ".".join(parts[:at]), parts[at + 1 :]
        role, embedding = FACTORS[parts[at]]
        if not embedding and rest and rest[-1] == "weight":
            rest = rest[:-1]
        elif not embedding and rest:
            return ParsedKey(key, module, "other")  # lora_B.bias and the like
        return ParsedKey(key, module, role, embedding, ".".join(rest) or None)
    owner = parts[:-1]
    if parts[-1] in ("weight", "bias") and not {"modules_to_save", "original_module", "token_adapter"} & set(owner):
        if owner and owner[-1] == "base_layer":
            owner = owner[:-1]
        return ParsedKey(key, ".".join(owner), "copy", parameter=parts[-1])
    return ParsedKey(key, ".".join(owner), "other")


class NameResolver:
    """Finds the modules of the base that a name in an adapter file means.

    An alias or an exact name wins. Otherwise the name is compared without leading wrappers (`base_prefix`, `model`,
    `language_model`, in any order) and after `renames`; all that is found this way must be one and the same module.
    """

    def __init__(
        self,
        modules: Collection[str],
        *,
        aliases: Mapping[str, Sequence[str]] | None = None,
        renames: Sequence[tuple[str, str]] = (),
        base_prefix: str = "",
    ) -> None:
        self._modules = modules
        self._aliases = {name: tuple(targets) for name, targets in (aliases or {}).items()}
        for name, targets in self._aliases.items():
            absent = [target for target in targets if target not in modules]
            if absent or not targets:
                raise AdapterError(f"the alias {name!r} must name modules of the base, got {absent or 'none'}")
        self._renames = tuple((re.compile(pattern), replacement) for pattern, replacement in renames)
        self._outer = {"model", "language_model", *filter(None, base_prefix.split("."))}
        self._by_core: dict[str, list[tuple[str, ...]]] = {}
        for module in modules:
            if module not in self._aliases:
                self._by_core.setdefault(self._core(module), []).append((module,))
        for name, targets in self._aliases.items():
            self._by_core.setdefault(self._core(name), []).append(targets)

    def _core(self, name: str) -> str:
        """`name` without its leading wrapper components; the last component always stays."""
        parts = name.split(".")
        while len(parts) > 1 and parts[0] in self._outer:
            parts = parts[1:]
        return ".".join(parts)

    def _exact(self, name: str) -> tuple[str, ...] | None:
        return self._aliases.get(name) or ((name,) if name in self._modules else None)

    def _renamed(self, name: str) -> str:
        """`name` after every rename, each applied to the parameter's name as Transformers does."""
        key = f"{name}.weight"
        for pattern, replacement in self._renames:
            key = pattern.sub(replacement, key)
        return key.removesuffix(".weight")

    def resolve(self, name: str) -> tuple[str, ...]:
        """The modules that `name` stands for; empty when there are none. AdapterError when several could be meant."""
        exact = self._exact(name)
        if exact is not None:
            return exact
        found = list(self._by_core.get(self._core(name), ()))
        renamed = self._renamed(name)
        if renamed != name:
            direct = self._exact(renamed)
            found += [direct] if direct is not None else self._by_core.get(self._core(renamed), ())
        found = list(dict.fromkeys(found))
        if len(found) > 1:
            raise AdapterError(
                f"the adapter's module {name!r} must mean one module of the base, but it could be any of "
                f"{listed('/'.join(targets) for targets in found)}; rename its keys to the one it was trained on"
            )
        return found[0] if found else ()

    def close_matches(self, names: Sequence[str]) -> list[str]:
        """Modules of the base whose names resemble the first few of `names`."""
        close: dict[str, None] = {}
        for name in names[:SHOWN]:
            close.update(dict.fromkeys(difflib.get_close_matches(name, self._modules, n=2, cutoff=0.6)))
        return list(close)[:SHOWN]


def covers(target_modules: str | Sequence[str], module: str) -> bool:
    """Whether a deployment's `target_modules` (a regex for the whole path, or a list of suffixes) covers `module`."""
    if isinstance(target_modules, str):
        return re.fullmatch(target_modules, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in target_modules)
