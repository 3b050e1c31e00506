"""Names in an adapter file: what a key says, and which module of the base it means."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
SAVED_UNDER, TOKENS_UNDER = "modules_to_save", "token_adapter"
SHOWN = 5  # names listed in one error


def listed(names: Iterable[str]) -> str:
    """The first few names and how many more there are."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def shown(target_modules: str | Sequence[str]) -> str:
    """A setting in an error: all-linear may be thousands of names."""
    return repr(target_modules) if isinstance(target_modules, str) else f"[{listed(target_modules)}]"


@dataclass(frozen=True)
class ParsedKey:
    """One key of an adapter file.

    `role` is "a" or "b" (a factor), "saved" (a parameter under `modules_to_save`), "tokens" (trained rows), "copy" (a
    parameter under the name it has in the base: a copy, or saved in full) or "other" (something no plain LoRA has).
    """

    key: str
    module: str  # as the file names it, without PEFT's prefix
    role: str
    embedding: bool = False
    adapter: str | None = None  # the adapter's name at training time, where the key still holds it
    parameter: str = ""  # saved, copy: "weight", "bias", "running_mean", ...
    root: str = ""  # saved: the module that PEFT wrapped, `module` or one around it
    original: bool = False  # copy: under `original_module`, so it is what the base held in training
    depth: int = 0  # a, b: how many layers of PEFT it lies inside, around one module


def parse_key(key: str) -> ParsedKey:
    """Split `key` into module, role and training-time adapter name.

    Accepted: with or without `base_model.model.`, wrapper components anywhere, `lora_A[.name].weight`,
    `lora_embedding_A[.name]`, `X.modules_to_save.name.weight`, `X.token_adapter.trainable_tokens_delta[.name]`, and
    parameters of the base `X.weight`, `X.base_layer.weight`, `X.original_module.weight` (or of any other name).
    """
    parts = [part for part in key.split(".") if part not in WRAPPERS]
    if tuple(parts[:2]) == PEFT_PREFIX:
        parts = parts[2:]
    if not parts:
        return ParsedKey(key, "", "other")
    # the first marker: an adapter may itself be called "lora_A"
    at = next((i for i, part in enumerate(parts) if part in FACTORS or part in (SAVED_UNDER, TOKENS_UNDER)), None)
    if at is None:
        return _plain(key, parts)
    marker, rest = parts[at], parts[at + 1 :]
    owner = _without_layers(parts[:at])
    module, depth = ".".join(owner), at - len(owner)
    if marker in FACTORS:
        role, embedding = FACTORS[marker]
        if not embedding and rest and rest[-1] == "weight":
            rest = rest[:-1]
        elif not embedding and rest:
            return ParsedKey(key, module, "other")  # lora_B.bias and the like
        return ParsedKey(key, module, role, embedding, ".".join(rest) or None, depth=depth)
    if marker == TOKENS_UNDER:
        if rest[:1] == ["trainable_tokens_delta"]:
            return ParsedKey(key, module, "tokens", adapter=".".join(rest[1:]) or None)
        if rest[:1] == ["base_layer"]:
            return replace(parse_key(".".join([*parts[:at], *rest[1:]])), key=key)
        return ParsedKey(key, module, "other")
    adapter, inner = (rest[0], rest[1:]) if len(rest) > 1 else (None, rest)
    plain = _plain(key, [*parts[:at], *inner])
    if plain.role != "copy":
        return plain
    return replace(plain, role="saved", adapter=adapter, root=module)


def _plain(key: str, parts: list[str]) -> ParsedKey:
    """A parameter under the name that it has in the base."""
    owner, parameter = parts[:-1], parts[-1]
    original = "original_module" in owner
    owner = _without_layers([part for part in owner if part != "original_module"])
    role = "other" if any(part.startswith("lora_") for part in parts) else "copy"
    return ParsedKey(key, ".".join(owner), role, parameter=parameter, original=original)


def _without_layers(parts: list[str]) -> list[str]:
    """Components of a module's name without the `base_layer` that a layer of PEFT wraps."""
    while parts and parts[-1] == "base_layer":
        parts = parts[:-1]
    return parts


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

    def is_alias(self, name: str) -> bool:
        """Whether `name` stands for modules that do its work, as it is never called itself."""
        if name in self._aliases or name in self._modules:
            return name in self._aliases
        return any(self._core(alias) == self._core(name) for alias in self._aliases)

    def renamed(self, name: str) -> str:
        """`name` after every rename, each applied once to the parameter's name as Transformers does."""
        key = f"{name}.weight"
        for pattern, replacement in self._renames:
            key = pattern.sub(replacement, key, count=1)
        return key.removesuffix(".weight")

    def resolve(self, name: str) -> tuple[str, ...]:
        """The modules that `name` stands for; empty when there are none. AdapterError when several could be meant."""
        exact = self._exact(name)
        if exact is not None:
            return exact
        found = list(self._by_core.get(self._core(name), ()))
        renamed = self.renamed(name)
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
