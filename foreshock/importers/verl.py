"""verl's rollout dumps: `N.jsonl` of `trainer.rollout_data_dir`. They have texts and scores, no tokens.

Written by `RayPPOTrainer._write_generations` of `verl/trainer/ppo/ray_trainer.py` (verl 0.9.1): `input`, `output`,
`gts`, `score`, `step` and what the reward function returned. Without token ids and log-probs there is no mismatch to
measure. The mean score of the step is imported as `critic/score/mean`, verl's own name of it.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from foreshock.importers.dumps import (
    Dump,
    ImportedStep,
    ReadOptions,
    ends_with,
    find_numbered,
    read_lines,
    refusal,
    required,
)
from foreshock.importers.rows import number

__all__ = ["VerlFormat"]

_NAME = re.compile(r"(\d+)\.jsonl")
_MISSING = (
    "verl's rollout dumps have texts and scores only, no token ids and no log-probs: nothing to measure. Set "
    "FORESHOCK_URL when you start verl, and actor_rollout_ref.rollout.calculate_log_probs=True: then verl logs its "
    "rollouts itself"
)


class VerlFormat:
    """The format `verl`."""

    name = "verl"
    framework = "verl"
    layout = "N.jsonl of trainer.rollout_data_dir"
    pickled = False

    def find(self, path: Path) -> list[Dump]:
        """Return the steps in `path`: a file, or the folder."""
        return find_numbered(path, _NAME)

    def has_end(self, path: Path) -> bool:
        """Return True if the last line is complete."""
        return ends_with(path, b"\n")

    def read(self, dump: Dump, options: ReadOptions) -> ImportedStep:
        """Read the scores of a step."""
        scores = []
        for place, line in read_lines(dump.files[0], options.limits):
            if line.get("step", dump.step) != dump.step:
                raise refusal(place, "step", f"is {line['step']!r} in the file of step {dump.step}")
            for field in ("input", "output"):
                if not isinstance(required(line, field, place), str):
                    raise refusal(place, field, f"expected a text, got {type(line[field]).__name__}")
            score = number(required(line, "score", place), place, "score")
            if score is not None and math.isfinite(score):
                scores.append(score)
        scalars = {"critic/score/mean": math.fsum(scores) / len(scores)} if scores else {}
        return ImportedStep(dump.step, (), scalars, (_MISSING,))
