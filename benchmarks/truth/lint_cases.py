"""Faults of the logged data: put into the rollouts of the recorded runs, named by the lint; and the same runs clean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.recorded_runs import RecordedRun, recorded_runs
from benchmarks.truth.bench import Bench, RefusedError
from benchmarks.truth.case import Case, Outcome, Sentence
from foreshock.rollouts import RolloutBatch

__all__ = ["CASES"]

Edit = Callable[[RolloutBatch], RolloutBatch]

_OTHER_NAME_OF_A_SHIFT = ("mean_ratio", "tokens_without_engine", "tokens_without_trainer")


def as_logged(batch: RolloutBatch) -> RolloutBatch:
    """Return the batch unchanged."""
    return batch


def shifted(batch: RolloutBatch) -> RolloutBatch:
    """Shift log π by one token: logits[:, 1:] instead of logits[:, :-1]."""
    return replace(batch, trainer_log_probs=np.roll(_target(batch), 1))


def negated(batch: RolloutBatch) -> RolloutBatch:
    """Log the trainer's negative log-likelihood."""
    return replace(batch, trainer_log_probs=-_target(batch))


def probabilities(batch: RolloutBatch) -> RolloutBatch:
    """Log the trainer's probabilities."""
    return replace(batch, trainer_log_probs=np.exp(_target(batch)))


def base_2(batch: RolloutBatch) -> RolloutBatch:
    """Log the trainer's log-probs to base 2."""
    return replace(batch, trainer_log_probs=_target(batch) / np.float32(np.log(2)))


def bypass(batch: RolloutBatch) -> RolloutBatch:
    """Log the engine's log-probs as the trainer's."""
    return replace(batch, trainer_log_probs=batch.rollout_log_probs)


def duplicated(batch: RolloutBatch, share: float = 1.0) -> RolloutBatch:
    """Log a share of the rollouts twice, as a batch that is padded to a multiple, or that two ranks log."""
    again = batch.select([*range(batch.num_rollouts), *range(round(share * batch.num_rollouts))])
    return replace(again, sample_ids=[f"row-{row}" for row in range(again.num_rollouts)])


def quarter_duplicated(batch: RolloutBatch) -> RolloutBatch:
    """Log a quarter of the rollouts twice."""
    return duplicated(batch, 0.25)


def logged(run: RecordedRun, step: int, edit: Edit) -> Callable[[Bench], Outcome]:
    """Return a case's function: log one recorded step, edited, and return what is shown of it."""

    def case(bench: Bench) -> Outcome:
        key = f"{run.name}-{step}-{edit.__name__}"
        try:
            stored = bench.log_run(key, {step: edit(run.rollouts(step))}, model_kind="dense")
        except RefusedError as error:
            return Outcome((Sentence("refused", str(error), names_cause=True),))
        return bench.shown(stored)

    return case


def _target(batch: RolloutBatch) -> NDArray[np.float32]:
    assert batch.trainer_log_probs is not None
    return batch.trainer_log_probs


def _cases() -> tuple[Case, ...]:
    found = []
    for run in recorded_runs():
        step = run.steps()[1]
        found.append(Case(f"clean, run {run.name}, step {step}", None, True, logged(run, step, as_logged)))
    run = recorded_runs()[0]
    faults: tuple[tuple[str, str, Edit, tuple[str, ...]], ...] = (
        ("log π shifted by one token", "shifted_log_probs", shifted, _OTHER_NAME_OF_A_SHIFT),
        ("negative log-likelihood logged", "log natural-log probabilities, not", negated, ()),
        ("probabilities logged", "log natural-log probabilities, not probabilities", probabilities, ()),
        ("log π to base 2", "wrong_log_base", base_2, ("mean_ratio",)),
        ("log π copied from log μ", "identical_log_probs", bypass, ()),
        ("rollouts logged twice", "duplicated_rollouts", duplicated, ()),
    )
    for name, cause, edit, also_true in faults:
        found.append(Case(name, cause, True, logged(run, run.steps()[1], edit), also_true))
    # Of 128 short answers to 8 prompts 70 equal another one by chance: 32 more are within what chance gives.
    few = logged(run, run.steps()[1], quarter_duplicated)
    found.append(Case("a quarter of short rollouts logged twice", "duplicated_rollouts", False, few))
    return tuple(found)


CASES = _cases()
