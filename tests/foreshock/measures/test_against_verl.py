"""Comparison with verl's own functions: agreement, and verl's numerical errors with both numbers."""

import math

import numpy as np
import pytest

pytest.importorskip("verl", reason="verl, whose functions these are compared with, is not installed")

from foreshock.measures import measure_step
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.rollouts import RolloutBatch
from tests.foreshock.measures import verl_reference as verl

pytestmark = pytest.mark.slow  # importing verl takes a while


def measured(target: np.ndarray, behaviour: np.ndarray, lengths: list[int]) -> dict[str, float]:
    return ComparisonStatistics.of(target, behaviour, np.concatenate([[0], np.cumsum(lengths)])).measures()


def by_verl(target: np.ndarray, behaviour: np.ndarray, lengths: list[int], *, double: bool) -> dict[str, float]:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    padded = verl.Padded.of(target, behaviour, offsets, double=double)
    # Over a single token its correlation is a warning.
    return verl.off_policy_metrics(padded) | (verl.debug_metrics(padded) if target.size > 1 else {})


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.1, 3.0])
def test_measures_equal_verls_in_float64(size: float) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 200, 16).tolist()
    behaviour = -random.exponential(1.0, sum(lengths)).astype(np.float32)
    d = size * random.normal(0, 1, behaviour.size) / math.sqrt(max(lengths))
    target = np.minimum(behaviour + d, 0).astype(np.float32)
    ours, theirs = measured(target, behaviour, lengths), by_verl(target, behaviour, lengths, double=True)
    assert theirs.keys() == verl.OURS.keys()
    for name, value in theirs.items():
        # Relative, or 1e-12 where verl's value is below 1e-6: its exp(d) − d − 1 has no more digits there.
        assert ours[verl.OURS[name]] == pytest.approx(value, rel=1e-6, abs=1e-12), name


def test_verls_tensors_are_accepted_unchanged() -> None:
    """Padded, with tool output between the model's turns: the same numbers from the same tensors."""
    random = np.random.default_rng(1)
    lengths = random.integers(2, 60, 16)
    behaviour = -random.exponential(1.0, lengths.sum()).astype(np.float32)
    target = np.minimum(behaviour + random.normal(0, 0.1, behaviour.size), 0).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    sampled = random.random(behaviour.size) < 0.8
    sampled[offsets[:-1]] = True
    held = verl.Padded.of(target, behaviour, offsets, sampled, width=80)
    rollouts = RolloutBatch.from_padded(
        held.mask, held.mask, rollout_log_probs=held.behaviour, trainer_log_probs=held.target
    )
    ours = measure_step(rollouts).comparisons["trainer/rollout"].measures()
    double = verl.Padded.of(target, behaviour, offsets, sampled, width=80, double=True)
    for name, value in (verl.off_policy_metrics(double) | verl.debug_metrics(double)).items():
        assert ours[verl.OURS[name]] == pytest.approx(value, rel=1e-6, abs=1e-12), name
