"""What one of several processes does, started by `processes.py`: python -m tests.parallel.worker SCENARIO FOLDER.

It writes what it found to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as tf

from . import changes, life, refusals
from .answers import dense, mixtures, one_expert

SCENARIOS: dict[str, Callable[[Path, int], Any]] = {
    "dense": dense,
    "mixtures": mixtures,
    "one expert": one_expert,
    "life": life.run,
    "changes": changes.run,
    "refusals": refusals.run,
    "ended": refusals.ended,
    "late": refusals.late,
}


def main(scenario: str, folder: Path) -> None:
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    found = SCENARIOS[scenario](folder, rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if scenario not in ("ended", "late"):
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
