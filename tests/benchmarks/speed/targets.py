"""What the figures stand beside: the best peer, the probe, the target. Data, from measurements on one H200.

A value is a ratio to the bare model in the same run and lower is better, unless `better` and `unit` say otherwise.
peer: the best of the serving engines' kernels, dropped into the same linears (PEFT, where there is no other). probe:
the best throw-away experiment. stretch: a target beyond the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NOISE = 1.01  # times under a CUDA graph repeat to 1%


@dataclass(frozen=True)
class Target:
    """peer, probe, target, stretch: None where there is none. better: "lower" or "higher"."""

    peer: float | None = None
    probe: float | None = None
    target: float | None = None
    stretch: float | None = None
    better: str = "lower"
    unit: str = "x"

    def verdict(self, value: float) -> str:
        """met, stretch met, near (within the noise), MISSED, or nothing without a target."""
        if self.target is None:
            return ""
        if self.stretch is not None and self._within(value, self.stretch):
            return "stretch met"
        if self.reached(value):
            return "met"
        return "near" if self._within(value, self.target, NOISE) else "MISSED"

    def reached(self, value: float) -> bool:
        """Whether the target is met, as one is that there is not."""
        return self.target is None or self._within(value, self.target)

    def _within(self, value: float, goal: float, slack: float = 1.0) -> bool:
        sign = 1 if self.better == "lower" else -1
        return sign * value <= sign * goal * slack**sign


def _higher(**facts: Any) -> Target:
    return Target(better="higher", **facts)


FLAT = 0.95  # of the throughput without loads, and with few adapters

ACCURACY = ("decode 8,8", "decode 64,8", "decode 64,64", "prefill 8x256,8", "prefill 8x1024,8", "prefill 64x128,64")

# (stage, cell) -> what is known
TARGETS: dict[tuple[str, str], Target] = {
    # Llama-3-8B's shape, decode under a CUDA graph: rows,distinct adapters
    ("decode", "1,1"): Target(1.12, 0.954, 1.015, 1.0),
    ("decode", "8,8"): Target(1.12, 1.012, 1.015, 1.0),
    ("decode", "32,8"): Target(1.115, 1.015, 1.015, 1.0),
    ("decode", "64,8"): Target(1.08, 1.013, 1.015, 1.0),
    ("decode", "64,64"): Target(1.22, 1.10, 1.10, 1.085),
    ("decode", "8,0"): Target(1.0, None, 1.0),
    ("decode", "64,0"): Target(1.0, None, 1.0),
    # Qwen3-0.6B's shape
    ("decode-small", "1,1"): Target(1.12, 0.95, 1.04, 1.01),
    ("decode-small", "8,8"): Target(1.15, 1.04, 1.04, 1.01),
    ("decode-small", "32,8"): Target(None, None, 1.04, 1.01),
    ("decode-small", "64,8"): Target(1.12, 1.02, 1.04, 1.01),
    ("decode-small", "64,64"): Target(1.18, 1.06),
    ("decode-small", "8,0"): Target(1.0, None, 1.0),
    ("decode-small", "64,0"): Target(1.0, None, 1.0),
    # against the compiled bare model
    ("compiled", "8,8"): Target(None, 0.948, 0.95),
    ("compiled", "64,8"): Target(None, 1.016, 1.01),
    ("compiled", "64,64"): Target(None, 1.177, 1.10),
    # inside generate; the peer of eager steps is the best of 1.9 to 2.5
    ("generate", "eager 8,8"): Target(1.9, 1.29, 1.15, 1.10),
    ("generate", "eager 8,0"): Target(1.0, None, 1.0),
    ("generate", "static 8,8"): Target(None, 0.97, 0.97),
    ("generate", "peft 64,8"): _higher(peer=1.0, target=15.0),
    ("generate", "peft 64,64"): _higher(peer=1.0, target=90.0),
    # prompts: rows x tokens,distinct adapters
    ("prefill", "8x256,0"): Target(1.0, None, 1.0),
    ("prefill", "8x1024,0"): Target(1.0, None, 1.0),
    ("prefill", "8x1024,1"): Target(1.07, None, 1.05),
    ("prefill", "8x1024,8"): Target(1.07, 1.09, 1.05),
    ("prefill", "64x128,64"): Target(1.07, 1.2, 1.05),
    # seven linears of a layer: rows,distinct adapters
    ("linears", "256,32"): Target(1.60, None, 1.20),
    ("linears", "256,256"): Target(3.29, None, 2.2),
    # an adapter of 84 MB: ms; a stream of requests: its throughput over that of the same batches without loads
    ("loads", "slot"): Target(2300.0, 1.67, 1.65, unit="ms"),
    ("loads", "uniform"): _higher(target=FLAT),
    ("loads", "zipf"): _higher(target=FLAT),
    ("loads", "uniform, prefetch"): _higher(target=FLAT),
    ("loads", "zipf, prefetch"): _higher(target=FLAT),
    # errors over PEFT's own
    **{("accuracy", name): Target(1.0, None, 1.0) for name in ACCURACY},
    # throughput over that with 5 registered adapters; S-LoRA lost 5%
    ("many", "100 registered"): _higher(peer=0.95, target=FLAT),
    ("many", "1000 registered"): _higher(peer=0.95, target=FLAT),
    ("many", "2000 registered"): _higher(peer=0.95, target=FLAT),
}


def target(stage: str, cell: str) -> Target:
    """An empty one where nothing is known."""
    return TARGETS.get((stage, cell), Target())
