"""Compare evaluations with the direct ones, as flat dicts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from foreshock.corrections import Evaluation
from foreshock.measures.comparison import Comparison, compare
from foreshock.rollouts import RolloutBatch


def flat(evaluation: Evaluation) -> dict[str, float]:
    """Return the figures of an evaluation under the names that the direct evaluation uses."""
    affected = evaluation.affected
    result: dict[str, float] = {
        "kept_tokens": evaluation.kept_tokens,
        "kept_sequences": evaluation.kept_sequences,
        "touched_tokens": evaluation.touched_tokens,
        "mean": evaluation.weights.mean,
        "variance": evaluation.weights.variance,
        "effective_fraction": evaluation.weights.effective_fraction,
        "distortion": evaluation.distortion,
        "uncorrected_distortion": evaluation.uncorrected_distortion,
        "token_distortion": evaluation.token_distortion,
        "advantage_distortion": evaluation.advantage_distortion,
        "groups": affected.groups,
        "groups_touched": affected.groups_touched,
        "groups_emptied": affected.groups_emptied,
    }
    for side, population in (("touched", affected.touched), ("untouched", affected.untouched)):
        result[f"{side}_sequences"] = population.sequences
        result[f"{side}_reward"] = population.reward_mean
        result[f"{side}_length"] = population.length_mean
    return result


def assert_same(found: Evaluation, expected: dict[str, float], relative: float = 1e-9, absolute: float = 1e-11) -> None:
    """Assert that every figure agrees; NaN equals NaN."""
    assert found.not_estimable is None
    assert flat(found) == pytest.approx(expected, rel=relative, abs=absolute, nan_ok=True)


def compared(batch: RolloutBatch) -> Comparison:
    """Return the comparison trainer/rollout of a batch that has both."""
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    return compare(batch, batch.trainer_log_probs, batch.rollout_log_probs)


def batch_of(d: list[list[float]], behaviour: float = -30.0, **columns: Any) -> RolloutBatch:
    """Return rollouts with these d = log π − log μ; `behaviour` is log μ, low enough for log π ≤ 0."""
    lengths = [len(part) for part in d]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mu = np.full(int(offsets[-1]), behaviour)
    pi = mu + np.array([value for part in d for value in part])
    assert (pi <= 0).all()
    assert math.isfinite(behaviour)
    return RolloutBatch.from_arrays(
        [f"sample-{row}" for row in range(len(d))],
        np.zeros(len(d), np.int32),
        np.arange(len(d) + 1),
        np.zeros(int(offsets[-1]), np.int32),
        offsets,
        rollout_log_probs=mu,
        trainer_log_probs=pi,
        **columns,
    )
