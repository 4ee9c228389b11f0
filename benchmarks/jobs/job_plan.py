"""The jobs of the kills: which step is probed how, and how each job must end."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.jobs.probed_runs import ProbedRun
from foreshock.rollouts import RolloutBatch
from foreshock.scorers import ENGINE_REPLAY, REFERENCE, TRAINER_REPLAY
from tests.probes.tiny import make_rollouts, save_checkpoint

CHECKPOINTS = ("first", "second", "third")
TORCH, VLLM = (TRAINER_REPLAY, REFERENCE), (ENGINE_REPLAY,)
_STEPS_OF_A_RUN = 25
_ROLLOUT_SETS = 4
_VLLM_SHARE = 0.1
# One rollout at a time, so that a job lasts long enough to be interrupted.
OPTIONS: Mapping[str, dict[str, Any]] = {name: {"batch_size": 1} for name in TORCH}
# Jobs that cannot be done, by what is wrong with their checkpoint: the state that they must end in.
BROKEN: Mapping[str, str] = {"gone": "skipped", "digest": "failed", "root": "failed"}
_BROKEN_SHARE = 0.06


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A probe with one job. `broken`: a key of BROKEN, or empty."""

    probe: str
    scorers: tuple[str, ...]
    checkpoint: str
    rollouts: int
    broken: str


def rollout_sets() -> list[RolloutBatch]:
    """Return the rollouts of which each step has one set."""
    return [make_rollouts(40 + 20 * number, seed=number) for number in range(_ROLLOUT_SETS)]


def make_checkpoints(root: Path) -> None:
    """Save the checkpoints below `root`."""
    for seed, name in enumerate(CHECKPOINTS, 1):
        save_checkpoint(root / name, seed=seed)


def plan_jobs(draw: random.Random, jobs: int, runs: Sequence[ProbedRun]) -> list[PlannedJob]:
    """Log the steps of `runs`, one for each job, request a probe of each, and return what is planned."""
    sets, planned = rollout_sets(), []
    for number in range(jobs):
        run, step = runs[number % len(runs)], number // len(runs) + 1
        chosen, checkpoint = draw.randrange(_ROLLOUT_SETS), draw.choice(CHECKPOINTS)
        broken = draw.choice(sorted(BROKEN)) if draw.random() < _BROKEN_SHARE else ""
        scorers = VLLM if not broken and draw.random() < _VLLM_SHARE else draw.choice([TORCH, TORCH[:1], TORCH[1:]])
        run.log_step(step, sets[chosen])
        run.announce(
            step,
            "gone" if broken == "gone" else checkpoint,
            digest="sha256:" + "0" * 64 if broken in ("gone", "digest") else None,
            **({"root": "elsewhere"} if broken == "root" else {}),
        )
        planned.append(PlannedJob(run.probe(step, scorers, OPTIONS), scorers, checkpoint, chosen, broken))
    return planned


def runs_for(jobs: int) -> int:
    """Return the number of runs that so many jobs are spread over."""
    return max(1, jobs // _STEPS_OF_A_RUN)
