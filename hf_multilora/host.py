"""Adapters in host memory: one flat buffer each, page-locked where the adapter goes to a CUDA device.

flat = [ A of module 1 | B of module 1 | A of module 2 | ... ]   uint8, each factor once, at multiples of 256 bytes
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from transformers.utils import logging

from .formats import Adapter, AdapterError, LoraFactors
from .formats.checks import is_finite

logger = logging.get_logger(__name__)
ALIGN = 256  # bytes: as device memory is aligned, and enough for a view of any dtype
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # to compare bits: 0.0 == -0.0, NaN != NaN
FEW_ROWS = 32  # rank rows
HUGE = 1 << 21  # bytes of a huge page of Linux: one fault instead of 512, which took most of the time of a fresh copy
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device
HOST_SHARE = 0.25  # of the memory that is free at the start, for host copies of adapters


class HostMemoryError(MemoryError):
    """There was no host memory for an adapter's flat buffer of `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"no host memory for {nbytes} bytes")
        self.nbytes = nbytes


class Place(NamedTuple):
    """A factor in a flat buffer: first byte, dtype, shape."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, int]

    @property
    def end(self) -> int:
        """Where the next factor starts."""
        return self.offset + -(-self.shape[0] * self.shape[1] * self.dtype.itemsize // ALIGN) * ALIGN


@dataclass(eq=False)
class HostAdapter:
    """An adapter as slots hold it, in host memory.

    key      of the places: adapters of one shape have one key
    flat     uint8 [bytes] every factor once; memory pages that nothing else lies in
    places   path of the module -> where its A and its B lie; modules that have a factor in common share its place
    factors  path of the module -> (A [r, in], B [r, out], scale folded into B), views of `flat`
    parts    path of the module -> rank rows of each expert, where they differ by expert
    readers  device -> event (torch.cuda.Event) of the last copy that reads the buffer beside what computes there
    """

    flat: Tensor
    places: Mapping[str, tuple[Place, Place]]
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    factors: dict[str, tuple[Tensor, Tensor]] = field(init=False, repr=False)
    key: int = field(init=False, repr=False)
    readers: dict[torch.device, Any] = field(default_factory=dict, init=False, repr=False)
    agreed: tuple[int, int] = (0, 0)  # of a sharded base: bytes for the limit of host memory, a number for its files
    _unpin: Any = field(default=None, init=False, repr=False)  # weakref.finalize

    def __post_init__(self) -> None:
        views = views_of(self.flat, (place for pair in self.places.values() for place in pair))
        self.factors = {name: (views[2 * i], views[2 * i + 1]) for i, name in enumerate(self.places)}
        self.key = hash(tuple(self.places.items()))

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    @property
    def pinned(self) -> bool:
        """Whether the buffer is page-locked."""
        return self._unpin is not None

    def outdated(self, dtypes: Mapping[str, torch.dtype]) -> bool:
        """Whether it is coarser than the modules' dtypes are now, or may be out of their range."""
        for name, (a, _) in self.places.items():
            dtype = dtypes[name]
            if dtype != a.dtype and (torch.promote_types(dtype, a.dtype) != a.dtype or dtype == torch.float16):
                return True
        return False

    def pin(self) -> None:
        """Page-lock the buffer in place, so that a copy to a CUDA device is one transfer; where that fails, warn.

        Registered, since torch's allocator of pinned memory rounds up to powers of two: up to twice the bytes.
        """
        if self.pinned:
            return
        cudart: Any = torch.cuda.cudart()
        code = cudart.cudaHostRegister(self.flat.data_ptr(), self.nbytes, PORTABLE)
        if int(code) == 0:
            self._unpin = weakref.finalize(self, _unregister, cudart.cudaHostUnregister, self.flat, self.readers)
            self._unpin.atexit = False  # the process takes its memory along
            return
        take_cuda_error()
        logger.warning_once(
            f"host copies of adapters could not be page-locked (CUDA: {cudart.cudaGetErrorString(code)}), so they "
            f"reach the device more slowly; raise the limit of locked memory (ulimit -l), or lower max_cpu_loras"
        )

    def pairs(self) -> dict[str, LoraFactors]:
        """The adapter as it is held, without a copy: the scale is in B."""
        return {name: LoraFactors(a, b.t(), 1.0, self.parts.get(name)) for name, (a, b) in self.factors.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> HostAdapter:
        return _copy(self.flat, self.places, self.parts)

    def __reduce__(self) -> tuple[Callable[..., HostAdapter], tuple[Any, ...]]:
        return _copy, (self.flat, self.places, self.parts)


def pack(adapter: Adapter, names: Mapping[str, str], dtypes: Mapping[str, torch.dtype]) -> HostAdapter:
    """Factors as slots hold them: B transposed, with the scale folded in; equal ones once.

    names: module as the adapter calls it -> its path in `dtypes`, which has the dtype to hold it in.
    Beyond the buffer, one module's factors are held at a time. Raises HostMemoryError, and AdapterError where a dtype
    cannot hold a value or two names of one module have different factors.
    """
    packer, places = _Packer(), dict[str, tuple[Place, Place]]()
    for given, pair in adapter.factors.items():
        name = names[given]
        if name not in places:
            a, b = (
                packer.place(factor, dtypes[name] if factor.is_floating_point() else factor.dtype, scaling)
                for factor, scaling in parts(pair)
            )
            places[name] = a, b
    each = {names[given]: pair.parts for given, pair in adapter.factors.items() if pair.parts is not None}
    with torch.inference_mode(False), torch.no_grad():
        host = HostAdapter(own_pages(packer.end), places, each)
        written, met = set[Place](), set[str]()
        for given, pair in adapter.factors.items():
            name = names[given]
            pairs = zip(places[name], host.factors[name], parts(pair), strict=True)
            for place, view, (factor, scaling) in pairs:
                if place not in written:
                    _write(view, _scaled(factor, place.dtype, scaling))
                    written.add(place)
                    if not is_finite(view):
                        raise AdapterError(
                            f"{name}: the factors of {adapter.source} must be finite in {place.dtype}, some become "
                            f"Inf; pass lora_dtype='float32' or 'bfloat16'"
                        )
                elif name in met and not torch.equal(view, _scaled(factor, place.dtype, scaling).to(place.dtype)):
                    raise AdapterError(
                        f"{given} and {name} are one module of this base, so {adapter.source} must hold the same "
                        f"factors for both, they differ; load the base it was trained on"
                    )
            met.add(name)
    return host


def parts(pair: LoraFactors) -> tuple[tuple[Tensor, float | None], tuple[Tensor, float | None]]:
    """What a slot holds of a pair, each with the scale to fold in, if any: A [r, in] and B [r, out]."""
    return (pair.a, None), (pair.b.t(), None if pair.scaling == 1 else pair.scaling)


class _Packer:
    """Hands out places, the same one for factors that will be the same bits."""

    def __init__(self) -> None:
        self.end = 0
        self.known: dict[tuple[Any, ...], list[tuple[Tensor, Place]]] = {}

    def place(self, factor: Tensor, dtype: torch.dtype, scaling: float | None) -> Place:
        """factor [r, n]. Compared in full are only those of one shape, dtype and scale whose first diagonal agrees."""
        shape = (factor.shape[0], factor.shape[1])
        key = (shape, factor.dtype, dtype, scaling, *factor.diagonal()[:8].tolist())
        alike = self.known.setdefault(key, [])
        for other, place in alike:
            if factor is other or torch.equal(_bits(factor), _bits(other)):
                return place
        alike.append((factor, Place(self.end, dtype, shape)))
        self.end = alike[-1][1].end
        return alike[-1][1]


def _bits(factor: Tensor) -> Tensor:
    return factor.view(INTS[factor.dtype.itemsize])


def _scaled(factor: Tensor, dtype: torch.dtype, scaling: float | None) -> Tensor:
    """The factor times the scale, computed in float32 or finer; as it is where there is none."""
    return factor if scaling is None else factor.to(torch.promote_types(dtype, torch.float32)) * scaling


def _write(view: Tensor, values: Tensor) -> None:
    """By the fastest of the ways measured: values that lie transposed are cast first, and few rows stacked."""
    if values.is_contiguous():
        view.copy_(values)
    elif len(values) <= FEW_ROWS:
        torch.stack(values.to(view.dtype).unbind(), out=view)
    else:
        view.copy_(values.to(view.dtype))


def views_of(flat: Tensor, places: Iterable[Place], start: int = 0) -> list[Tensor]:
    """Factors in `flat`, which holds a buffer's bytes from `start` on. One operation each: a fill has hundreds."""
    typed: dict[torch.dtype, Tensor] = {}
    found = []
    for offset, dtype, shape in places:
        if dtype not in typed:
            typed[dtype] = flat.view(dtype)
        at = typed[dtype].storage_offset() + (offset - start) // dtype.itemsize
        found.append(typed[dtype].as_strided(shape, (shape[1], 1), at))
    return found


def _copy(flat: Tensor, places: Mapping[str, tuple[Place, Place]], each: Mapping[str, tuple[int, ...]]) -> HostAdapter:
    with torch.inference_mode(False), torch.no_grad():
        return HostAdapter(own_pages(flat.nbytes).copy_(flat), places, each)


def own_pages(nbytes: int) -> Tensor:
    """uint8 [nbytes] in memory pages that nothing else lies in: pages are locked whole, and by one owner."""
    whole, align = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PAGESIZE if nbytes < 4 * HUGE else HUGE
    try:
        raw = torch.empty(whole + align, dtype=torch.uint8, device="cpu")
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise HostMemoryError(nbytes) from error
    start = -raw.data_ptr() % align
    if align == HUGE and sys.platform == "linux":  # advice: a kernel that cannot take it leaves small pages
        inner = ctypes.c_size_t(nbytes // HUGE * HUGE)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(raw.data_ptr() + start), inner, mmap.MADV_HUGEPAGE)
    return raw[start : start + nbytes]


def out_of_memory(error: BaseException) -> bool:
    """Whether it says that memory ran out; torch's allocator of host memory has no class of its own for that."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def _unregister(unregister: Callable[[int], Any], flat: Tensor, readers: dict[Any, Any]) -> None:
    """Run when the adapter goes: `flat` keeps the memory until copies have read it and the driver has let go of it."""
    for event in readers.values():
        event.synchronize()
    if code := int(unregister(flat.data_ptr())):
        logger.warning_once(f"a host copy of an adapter could not be unregistered (CUDA error {code})")


def take_cuda_error() -> None:
    """Clear the error that a failed call left behind: the next kernel of anybody would raise it as its own."""
    try:
        torch.ones(1, device="cuda").neg_()
    except RuntimeError:
        pass  # that was it


def host_budget(root: Path = Path("/")) -> int:
    """Bytes of host memory for adapters: HOST_SHARE of what is free now, to the machine and to this control group, as
    /proc and /sys under root tell."""
    return int(max(0, min([psutil.virtual_memory().available, *_group_room(root)])) * HOST_SHARE)


def _group_room(root: Path) -> Iterator[int]:
    """Bytes that each control group of this process, up to the topmost that can be seen, may still take."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        v1 = "memory" in controllers.split(",")
        if controllers and not v1:
            continue
        top = root / "sys/fs/cgroup" / ("memory" if v1 else "")
        limit, used, cache = V1 if v1 else V2
        for group in (place := top / path.strip("/"), *place.parents):
            if not group.is_relative_to(top):
                break
            try:
                most, now = (group / limit).read_text(), int((group / used).read_text())
                words = (group / "memory.stat").read_text().split()
            except OSError:  # a group without a limit, or of which a container shows its own part only
                continue
            if most.strip() != "max":
                yield int(most) - now + int(dict(zip(words[::2], words[1::2], strict=True)).get(cache, 0))


# files of a control group: its limit, what it uses, and in memory.stat the part of that which is file cache to give up
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
