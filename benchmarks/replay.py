"""Compare replayed log-probs with the logged ones. `make bench-replay`

Every checkpointed step of every recorded run is scored by vLLM's prefill and by its decode (compared with the logged μ)
and by a forward pass set up as the trainer's (compared with the logged π). Each engine has its own process, as in a
worker, held to the instruction set that recorded the run. Each step is also scored with the weights of another step, as
a control.

Bars: max |d| ≤ 1e-5 if this CPU can be held to the run's environment, k3 < 1e-6 if it has a lower one; the control
differs by at least 100 times either bar. The noise floor is the same scorer with another batch composition.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.recorded_runs import RecordedRun, recorded_runs
from foreshock.digests import weights_digest
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import RolloutBatch, decode_scores, encode_rollouts
from foreshock.scorers import CHAIN, NOISE_FLOOR_VARIANT, default_scorers, middle_of_chain
from foreshock_probes.engines.environment import AS_IT_IS, EngineEnvironment
from foreshock_probes.engines.process import EnginePool
from foreshock_probes.engines.protocol import ScoreCommand

# The replay of each logged score: the engine's of log μ, the trainer's of log π.
ENGINE_REPLAY, TRAINER_REPLAY = (str(name) for name in middle_of_chain(default_scorers()))
SCORERS = (ENGINE_REPLAY, TRAINER_REPLAY)
# Before it in the chain: the engine's replay one token at a time, as it sampled. It takes some minutes more.
ENGINE_DECODE = CHAIN[CHAIN.index(ENGINE_REPLAY) - 1]
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
    """One step scored by one scorer. `same`: True if the environment is the one that recorded it."""

    run: str
    step: int
    scorer: str
    same: bool
    right: Difference
    floor: Difference
    wrong: Difference

    @property
    def reached(self) -> bool:
        within = self.right.maximum <= BAR_MAXIMUM or (not self.same and self.right.k3 < BAR_K3)
        return within and self.wrong.maximum > 100 * BAR_MAXIMUM and self.wrong.k3 > 100 * BAR_K3

    def __str__(self) -> str:
        return (
            f"{self.run:<10}{self.step:>5}  {self.scorer:<14}{self.right.maximum:>10.2e}{self.right.unequal:>9.1%}"
            f"{self.right.k3:>10.1e}{self.floor.k3:>10.1e}{self.wrong.maximum:>10.2f}{self.wrong.k3:>10.1e}"
            f"  {'ok' if self.reached else 'NOT REACHED'}"
        )


def rows_of(run: RecordedRun, replay: Replayer, scorers: Sequence[str] = SCORERS) -> Iterator[Row]:
    """Yield a row for each checkpointed step and scorer; weights are loaded once per scorer."""
    steps = run.steps()
    environment = run.environment.nearest()
    for scorer in scorers:
        wrong: dict[int, Difference] = {}
        right: dict[int, tuple[Difference, Difference, bool]] = {}
        for index, step in enumerate(steps):
            batch, weights = run.rollouts(step), run.checkpoint(step)
            scored, fingerprint = replay.score(batch, weights, scorer, environment=environment)
            again, _ = replay.score(batch, weights, scorer, NOISE_FLOOR_VARIANT, environment)
            same = EngineEnvironment.of_fingerprint(fingerprint).stands_for(run.environment)
            right[step] = Difference.between(scored, logged(batch, scorer)), Difference.between(again, scored), same
            other = steps[(index + 1) % len(steps)]
            others = run.rollouts(other)
            scored, _ = replay.score(others, weights, scorer, environment=environment)
            wrong[other] = Difference.between(scored, logged(others, scorer))
        for step, (difference, floor, same) in right.items():
            yield Row(run.name, step, scorer, same, difference, floor, wrong[step])


def main() -> int:
    runs = recorded_runs()
    if not runs:
        print("no recorded run was found: examples/tiny_rl/recorded must exist")
        return 1
    print(
        f"{'run':<10}{'step':>5}  {'scorer':<14}{'max |d|':>10}{'unequal':>9}{'k3':>10}{'floor k3':>10}"
        f"{'wrong |d|':>10}{'wrong k3':>10}"
    )
    rows: list[Row] = []
    with replayer() as replay:
        for run in runs:
            for row in rows_of(run, replay, (*SCORERS, ENGINE_DECODE)):
                print(row, flush=True)
                rows.append(row)
    other_environment = sorted({row.run for row in rows if not row.same})
    if other_environment:
        print(f"recorded in an environment that this CPU cannot be held to: {', '.join(other_environment)}")
    figures: dict[str, object] = {}
    for scorer in (*SCORERS, ENGINE_DECODE):
        for same, place in ((True, "same_environment"), (False, "other_environment")):
            chosen = [row.right for row in rows if row.scorer == scorer and row.same == same]
            if chosen:
                figures[f"{scorer}_{place}_max_abs_d"] = f"{max(each.maximum for each in chosen):.3e}"
                figures[f"{scorer}_{place}_k3"] = f"{max(each.k3 for each in chosen):.3e}"
    figures["wrong_weights_least_k3"] = f"{min(row.wrong.k3 for row in rows):.3e}"
    figures["reached"] = f"{sum(row.reached for row in rows)}/{len(rows)}"
    print(" ".join(f"{name}={value}" for name, value in figures.items()))
    return 0 if all(row.reached for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
