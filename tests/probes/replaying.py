"""Scores by real engines in processes of their own, as in a worker: compared with the logged values."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
from foreshock_probes.engines.process import EnginePool
from foreshock_probes.engines.protocol import ScoreCommand

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


class Replayer:
    """Scores rollouts in `engines` as a worker does, without a service. Files are exchanged in `folder`."""

    def __init__(self, folder: Path, engines: EnginePool) -> None:
        self._folder = folder
        self._pool = engines

    def score(
        self,
        batch: RolloutBatch,
        weights: Path,
        scorer: str,
        variant: str = "",
        environment: EngineEnvironment = AS_IT_IS,
        *,
        fresh: bool = False,
        **options: object,
    ) -> tuple[NDArray[np.float32], Fingerprint]:
        """Return the log-probs [T] of `batch` under `weights`, computed in `environment`, and their fingerprint.

        `fresh`: in an engine that never held other weights.
        """
        rollouts, scores = self._folder / "rollouts.parquet", self._folder / "scores.parquet"
        rollouts.write_bytes(encode_rollouts(batch))
        command = ScoreCommand(
            scorer=scorer,
            variant=variant,
            weights_folder=str(weights),
            weights_digest=weights_digest(weights),
            weights_version=None,
            options=dict(options),
            accelerator="cpu",
            rollouts=str(rollouts),
            scores=str(scores),
            fresh=fresh,
        )
        self._pool.score(command, lambda tokens: None, environment=environment)
        scored = decode_scores(scores.read_bytes())
        return scored.log_probs, scored.fingerprint

    def process_ids(self) -> dict[str, int]:
        """Return the id of the process that holds the model, by engine."""
        return self._pool.process_ids()


@contextmanager
def replayer() -> Iterator[Replayer]:
    """Yield a replayer; its engines end with the context."""
    with tempfile.TemporaryDirectory(prefix="foreshock-replay-") as folder:
        engines = EnginePool(Path(folder))
        try:
            yield Replayer(Path(folder), engines)
        finally:
            engines.close()


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


def rows_of(run: RecordedRun, replay: Replayer, scorers: Sequence[str] = SCORERS) -> Iterator[Row]:
    """Yield a row for each checkpointed step and scorer; weights are loaded once per scorer."""
    steps = run.steps()
    environment = run.environment.nearest()
    for scorer in scorers:
        wrong: dict[int, Difference] = {}
        right: dict[int, tuple[Difference, Difference | None, bool]] = {}
        for index, step in enumerate(steps):
            batch, weights = run.rollouts(step), run.checkpoint(step)
            scored, fingerprint = replay.score(batch, weights, scorer, environment=environment)
            same = EngineEnvironment.of_fingerprint(fingerprint).stands_for(run.environment)
            floor: Difference | None = None
            if scorer == TRAINER_REPLAY and not same:
                again, _ = replay.score(batch, weights, scorer, NOISE_FLOOR_VARIANT, environment)
                floor = Difference.between(again, scored)
            right[step] = Difference.between(scored, logged(batch, scorer)), floor, same
            other = steps[(index + 1) % len(steps)]
            others = run.rollouts(other)
            scored, _ = replay.score(others, weights, scorer, environment=environment)
            wrong[other] = Difference.between(scored, logged(others, scorer))
        for step, (difference, floor, same) in right.items():
            yield Row(run.name, step, scorer, same, difference, floor, wrong[step])


def questions_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the doctor asks engines from now on, as it asks.

    Not the pool's commands: one that finds a kept process gone is repeated in a new one.
    """
    made: list[str] = []
    score = EngineReplays._scored

    def counted(replays: EngineReplays, asked: str) -> NDArray[np.float32]:
        made.append(asked)
        return score(replays, asked)

    monkeypatch.setattr(EngineReplays, "_scored", counted)
    return made
