"""Scores by real engines in processes of their own, as in a worker: compared with the logged values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.recorded_runs import RecordedRun
from foreshock.digests import weights_digest
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import RolloutBatch, decode_scores, encode_rollouts
from foreshock.scorers import NOISE_FLOOR_VARIANT, default_scorers, middle_of_chain
from foreshock_probes.doctor.engines import EngineReplays
from foreshock_probes.engines.environment import AS_IT_IS, EngineEnvironment
from foreshock_probes.engines.process import run_tasks
from foreshock_probes.scorers.request import ScoreTask
from tests.probes.held import stands_for

# The replay of each logged score: the engine's of log μ, the trainer's of log π.
ENGINE_REPLAY, TRAINER_REPLAY = (str(name) for name in middle_of_chain(default_scorers()))
SCORERS = (ENGINE_REPLAY, TRAINER_REPLAY)
BAR_MAXIMUM = 1e-5
BAR_K3 = 1e-6


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference d = replayed − logged log-prob over all tokens: mean k3, max |d|, fraction of tokens with d ≠ 0."""

    k3: float
    maximum: float
    unequal: float

    @classmethod
    def between(cls, replayed: NDArray[np.float32], logged: NDArray[np.float32]) -> Difference:
        d = replayed.astype(np.float64) - logged.astype(np.float64)
        return cls(float(np.mean(np.expm1(d) - d)), float(np.abs(d).max()), float(np.mean(replayed != logged)))


@dataclass(frozen=True, slots=True)
class Asked:
    """A score that is wanted: `batch` under `weights`."""

    batch: RolloutBatch
    weights: Path
    scorer: str
    variant: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def task(self, folder: Path, name: str, **fields: Any) -> ScoreTask:
        """Return the task, with its files in `folder`."""
        rollouts = folder / f"{name}.rollouts"
        rollouts.write_bytes(encode_rollouts(self.batch))
        return ScoreTask(
            self.scorer, self.variant, rollouts, self.weights, weights_digest(self.weights), options=self.options,
            result=folder / f"{name}.result", **fields,
        )  # fmt: skip


Score = tuple[NDArray[np.float32], Fingerprint]


def scored(folder: Path, *asked: Asked, environment: EngineEnvironment = AS_IT_IS) -> list[Score]:
    """Return the log-probs [T] and the fingerprint of each score; consecutive ones of an engine have one process."""
    tasks = [each.task(folder, str(number)) for number, each in enumerate(asked)]
    return run_tasks(tasks, scores_of_task, folder, environment=environment).results


def scores_of_task(task: ScoreTask) -> Score:
    """Return what a task of scoring wrote."""
    scores = decode_scores(task.result.read_bytes())
    return scores.log_probs, scores.fingerprint


def logged(batch: RolloutBatch, scorer: str) -> NDArray[np.float32]:
    """Return the logged log-probs [T] that `scorer` replays."""
    values = batch.trainer_log_probs if scorer == TRAINER_REPLAY else batch.rollout_log_probs
    assert values is not None
    return values


@dataclass(frozen=True, slots=True)
class Row:
    """One step scored by one scorer. `same`: True if the environment is the one that recorded it.

    `floor` is there only for what the trainer's replay is compared with in another environment.
    """

    run: str
    step: int
    scorer: str
    same: bool
    right: Difference
    floor: Difference | None
    wrong: Difference


def rows_of(run: RecordedRun, folder: Path, scorers: Sequence[str] = SCORERS) -> list[Row]:
    """Return a row for each checkpointed step and scorer; each scorer has one process."""
    steps = run.steps()
    environment = run.environment.nearest()
    others = {step: steps[(index + 1) % len(steps)] for index, step in enumerate(steps)}
    rows: list[Row] = []
    for scorer in scorers:
        asked: list[Asked] = []
        for step in steps:
            batch, weights = run.rollouts(step), run.checkpoint(step)
            asked += [Asked(batch, weights, scorer), Asked(run.rollouts(others[step]), weights, scorer)]
            if scorer == TRAINER_REPLAY:
                asked.append(Asked(batch, weights, scorer, NOISE_FLOOR_VARIANT))
        found = iter(scored(folder, *asked, environment=environment))
        right: dict[int, tuple[Difference, Difference | None, bool]] = {}
        wrong: dict[int, Difference] = {}
        for step in steps:
            (plain, fingerprint), (of_other, _) = next(found), next(found)
            same = stands_for(EngineEnvironment.of_fingerprint(fingerprint), run.environment)
            again = next(found)[0] if scorer == TRAINER_REPLAY else None
            floor = Difference.between(again, plain) if again is not None and not same else None
            right[step] = Difference.between(plain, logged(run.rollouts(step), scorer)), floor, same
            wrong[others[step]] = Difference.between(of_other, logged(run.rollouts(others[step]), scorer))
        rows += [
            Row(run.name, step, scorer, same, difference, floor, wrong[step])
            for step, (difference, floor, same) in right.items()
        ]
    return rows


def questions_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the doctor asks engines from now on, as it asks."""
    made: list[str] = []
    score = EngineReplays._scored

    def counted(replays: EngineReplays, asked: str) -> NDArray[np.float32]:
        made.append(asked)
        return score(replays, asked)

    monkeypatch.setattr(EngineReplays, "_scored", counted)
    return made
