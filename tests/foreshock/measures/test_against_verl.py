"""Comparison with verl's own functions: agreement, and verl's numerical errors with both numbers."""

from __future__ import annotations

import math
from fractions import Fraction

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


def exact_k3(d: float) -> float:
    x = Fraction(d)
    return float(sum((x**power / math.factorial(power) for power in range(3, 20)), x * x / 2))


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


def test_k3_in_float32_is_wrong_at_a_healthy_mismatch_and_may_be_negative() -> None:
    """verl computes exp(d) − d − 1 in float32: three numbers near 1 whose difference is k3."""
    behaviour = np.full(1000, -0.5, np.float32)
    target = (behaviour + np.float32(3e-4)).astype(np.float32)
    d = float(target[0]) - float(behaviour[0])
    ours = measured(target, behaviour, [1000])["k3_kl"]
    theirs = by_verl(target, behaviour, [1000], double=False)["k3_kl"]
    assert ours == pytest.approx(exact_k3(d), rel=1e-12)
    assert ours == pytest.approx(4.5e-8, rel=0.01)
    assert abs(theirs / ours - 1.0) > 0.1
    random = np.random.default_rng(0)
    negative = 0
    for _ in range(100):
        behaviour = -random.exponential(1.0, 100).astype(np.float32)
        target = (behaviour + random.normal(0, 1e-4, 100)).astype(np.float32)
        negative += by_verl(target, behaviour, [100], double=False)["k3_kl"] < 0.0
        assert measured(target, behaviour, [100])["k3_kl"] == pytest.approx(5e-9, rel=0.7)
    assert negative > 10


def test_effective_sample_size_of_truncated_weights_cannot_fall_to_its_alarm() -> None:
    """verl truncates weights at C = 2 before computing their ESS.

    With half of the weights a hundred times as large as the others, its ESS hardly changes.
    """
    behaviour = np.full(1000, -6.0, np.float32)
    target = behaviour.copy()
    target[::100] = -0.1  # ρ = 365 for one token in a hundred
    lengths = [1000]
    ours = measured(target, behaviour, lengths)["ess_token"]
    offsets = np.array([0, 1000])
    theirs = verl.correct(verl.Padded.of(target, behaviour, offsets), rollout_is="token", rollout_is_threshold=2.0)
    ratios = np.exp(target.astype(np.float64) - behaviour)
    assert ours == pytest.approx(ratios.sum() ** 2 / (1000 * np.square(ratios).sum()), rel=1e-9)
    assert ours < 0.02
    assert theirs["rollout_is_eff_sample_size"] > 0.95


def test_verls_clamp_at_twenty_hides_larger_differences() -> None:
    """verl clamps d to ±20 before squaring ρ: beyond, its χ² does not grow."""
    behaviour = np.array([-25.0, -30.0], np.float32)
    target = np.zeros(2, np.float32)
    far, farther = (measured(target[i : i + 1], behaviour[i : i + 1], [1])["verl_chi2_token"] for i in range(2))
    clamped = [by_verl(target[i : i + 1], behaviour[i : i + 1], [1], double=True)["chi2_token"] for i in range(2)]
    assert far == pytest.approx(math.expm1(50.0), rel=1e-9)
    assert farther == pytest.approx(math.expm1(60.0), rel=1e-9)
    assert clamped == pytest.approx([math.expm1(40.0)] * 2, rel=1e-6)


def test_padding_is_not_counted() -> None:
    """Neither counts padding: the same rollouts in a wider batch give the same numbers."""
    behaviour = np.array([-1.0, -2.0, -0.5], np.float32)
    target = np.array([-1.1, -1.9, -0.7], np.float32)
    offsets = np.array([0, 1, 3])
    ours = measured(target, behaviour, [1, 2])
    for width in (2, 50):
        padded = verl.Padded.of(target, behaviour, offsets, width=width, double=True)
        for name, value in verl.off_policy_metrics(padded).items():
            assert ours[verl.OURS[name]] == pytest.approx(value, rel=1e-6), name


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
