"""The verbs of a MultiLoRAModel on its adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .inherited import InheritedVerbs
from .reader import Reader

if TYPE_CHECKING:
    from .compare import Comparison
    from .reports import MemoryReport, WarmupReport
    from .verify import VerifyReport


class AdapterVerbs(InheritedVerbs):
    """Mixed in front of a model's own class, under MultiLoRAModel."""

    def load_adapter(
        self, path: str, adapter_name: str | None = None, *, revision: str | None = None, subfolder: str = "",
        pinned: bool = False, load_inplace: bool = False,
    ) -> str:  # fmt: skip
        """Read a PEFT checkpoint and register it; returns its name (None: the last part of the path).

        load_inplace: replace the weights of the adapter registered under that name; its id stays, what was cached under
        the old content must not be used again. Raises AdapterError, FileNotFoundError, ValueError for a name that is
        taken, UnknownAdapterError for one to replace that is not registered, AdapterInUseError where a call uses it;
        the model then answers as before.
        """
        from .loading import last_part

        runtime = self._multilora
        name = last_part(path) if adapter_name is None else adapter_name
        reader = Reader(runtime, str(path), revision, subfolder)
        known = name in runtime.store.catalogue
        if known and not load_inplace:
            runtime.store.refuse_taken(name)
        if load_inplace:
            runtime.store.catalogue.entry(name)
        if pinned:
            runtime.store.refuse_pin(name)
        runtime.register(name, reader(), reader, replace=known)
        if pinned:
            self.pin_adapter(name)
        return name

    def save_adapter(self, adapter_name: str, folder: str, *, overwrite: bool = False) -> None:
        """Write a registered adapter into a local folder as a checkpoint that PEFT loads: config and safetensors, named
        by the modules of this base, in the dtype of its files.

        Raises UnknownAdapterError, FileExistsError where the folder holds an adapter unless overwrite, AdapterError for
        what PEFT could not read as it is meant; the folder then holds what it held.
        """
        from .saving import save_adapter

        save_adapter(self._multilora, adapter_name, folder, overwrite)

    def delete_adapter(self, adapter_name: str | Sequence[str]) -> None:
        """Forget an adapter (or several). Raises AdapterInUseError where a call uses it or it is the default."""
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        for name in names:
            self._multilora.require_not_default(name, "deleted")
        self._multilora.store.delete(*names)

    def pin_adapter(self, adapter_name: str) -> None:
        """Keep an adapter in host memory, where it is read if need be, and a slot for it. Raises CapacityError past
        max_loras."""
        self._multilora.store.pin(adapter_name)

    def unpin_adapter(self, adapter_name: str) -> None:
        """Let an adapter be evicted again."""
        self._multilora.store.unpin(adapter_name)

    def prefetch(self, adapter_names: Sequence[str | None] | None = None, *, adapter_ids: Any = None) -> None:
        """Start to bring adapters to the device for a call to come, while another computes; returns at once.

            model.prefetch(["summary", None, "title"])  # the rows of the next batch
            model(**batch)                              # computes meanwhile

        adapter_names: names, None for the base; or adapter_ids: integers, 0 for the base. Those in slots stay there for
        longer. Of the others the first max_loras are read from disk, in a thread, where they left host memory, and
        their bytes are copied to CUDA devices on a stream of their own. No slot changes: a call that needs one waits
        for its bytes, if need be, and moves them to a slot. At most 2 * max_loras adapters wait so, those asked for
        last; `memory_report().staging_bytes` has their bytes. What cannot be done ahead, as files cannot be read or
        memory is short, is logged, and the call that needs it does it, or raises.

        May be called from any thread, also while `generate` runs, but not while a CUDA graph is captured. Raises
        UnknownAdapterError, TypeError.
        """
        from .prefetch import prefetch

        ids = self._multilora.resolve(adapter_names, adapter_ids)
        if ids is None:
            raise TypeError("prefetch must be told adapter_names or adapter_ids, got neither")
        prefetch(self._multilora, ids)

    def prefetched(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The same batches, each one's adapters prefetched while the call on the one before computes.

            for batch in model.prefetched(loader):
                model(**batch)

        batches: mappings with "adapter_ids" or "adapter_names", as MultiLoRACollator makes them; one more than was
        handed out is taken from them. Raises as `prefetch` does, and ValueError for a batch without either.
        """
        from .prefetch import prefetched

        return prefetched(self, batches)

    def list_adapters(self) -> list[dict[str, Any]]:
        """One row per adapter: name, id, source, base_model, digest, max_rank, modules (how many), bytes, on_device,
        in_host_memory, pinned, default.
        """
        from .reports import list_adapters

        return list_adapters(self._multilora)

    def id2label(self, adapter_name: str | None = None) -> dict[int, str]:
        """Names of the logits of an adapter's rows, as many as there are: of its own head (`id2label` in its files), if
        it brings one, else the base's (`config.id2label`). None: the base.
        """
        from .heads import id2label

        return id2label(self._multilora, adapter_name)

    def split_logits(self, logits: Tensor, adapter_names: Sequence[str | None]) -> list[Tensor]:
        """Each row's own logits: `logits` [rows, ..., widest] of a call with these names, without the -inf that follows
        where an adapter has fewer labels (or a smaller vocabulary) than another of the batch.
        """
        from .heads import split_logits

        return split_logits(self._multilora, logits, adapter_names)

    def compare(
        self, prompts: Any, adapters: Sequence[str | None] | None = None, *, tokenizer: Any,
        max_new_tokens: int | None = None, batch_size: int = 16, **generate_kwargs: Any,
    ) -> Comparison:  # fmt: skip
        """The same prompts with several adapters, in mixed batches: a table, also in notebooks.

        prompts: texts, chats or, for classifiers, pairs of texts; one or a list. adapters: names, None for the base;
        left out: the base and all. tokenizer: pads on the side that the model needs, whatever its own setting. A model
        that generates answers with text (greedy, 40 tokens, unless told otherwise), a classifier with label and
        probability. `rows()` of the result are dicts, as pandas.DataFrame takes them. Raises UnknownAdapterError,
        ValueError for no prompts or a tokenizer without a pad token, TypeError for arguments that do not fit the model.
        """
        from .compare import compare

        return compare(self, prompts, adapters, tokenizer, max_new_tokens, batch_size, generate_kwargs)

    def memory_report(self) -> MemoryReport:
        """Bytes that adapters take on the device, per module and in all, and in host memory."""
        from .reports import memory_report

        return memory_report(self._multilora)

    def verify(self, adapter_name: str, inputs: Mapping[str, Any] | None = None) -> VerifyReport:
        """Compare this adapter's rows with the adapter merged into the weights; says where they differ first."""
        from .verify import verify

        return verify(self, adapter_name, inputs)

    def warmup(
        self, inputs: Mapping[str, Any] | None = None, *, rows: Sequence[int] | None = None,
        tokens: Sequence[int] = (1, 64, 512), max_seconds: float = 60.0, **generate_kwargs: Any,
    ) -> WarmupReport:  # fmt: skip
        """Have done what the first requests would wait for: pools and weights in place, kernels compiled, adapters in
        slots.

        Calls the model with mixed rows of every shape in rows x tokens, none of which starts after max_seconds. rows
        None: 1 and max_loras. inputs: one row of forward's arguments where the model takes no token ids. With
        generate_kwargs (max_new_tokens=8, cache_implementation="static", ...) it also generates, which compiles what
        Transformers compiles. Needs no files: where no adapter is registered, dummies of rank max_lora_rank stand in,
        and nothing of them is left but the pools. Raises ValueError where there is neither.
        """
        from .warmup import warmup

        return warmup(self, inputs, rows, tokens, max_seconds, generate_kwargs)
