"""The lint's benchmark: sampling distributions, healthy rollouts and counts."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lint import Row
from benchmarks.lint_defects import DEFECTS, EDITS
from benchmarks.lint_rollouts import PLAIN, Logged, SamplingParameters, Shape, World, batches_of, draw, normalised
from foreshock.lint import CHECKS, lint_batch
from foreshock.rollouts import RolloutBatch

SHAPE = Shape(rollouts=64, groups=8, limit=100)


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    world = World(1.0, -2.0)
    return batches_of(draw(world, PLAIN, SHAPE, 1), SHAPE, Logged())[0]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParameters(temperature=0.5),
        SamplingParameters(top_p=0.8),
        SamplingParameters(top_k=3),
        SamplingParameters(min_p=0.2),
        SamplingParameters(temperature=0),
    ],
)
def test_sampling_distribution_sums_to_1_and_keeps_likeliest_tokens(sampling: SamplingParameters) -> None:
    plain = normalised(np.random.default_rng(0).normal(0, 2, (200, 12)))
    shaped = sampling.apply(plain)
    np.testing.assert_allclose(np.exp(shaped).sum(-1), 1.0)
    assert (shaped.argmax(-1) == plain.argmax(-1)).all()
    kept = np.where(np.isfinite(shaped), np.exp(plain), 0.0)
    if sampling.top_p < 1:
        least = np.where(np.isfinite(shaped), np.exp(plain), 1.0).min(-1)
        assert (kept.sum(-1) >= sampling.top_p).all()
        assert (kept.sum(-1) - least < sampling.top_p).all()
    if sampling.top_k:
        assert (np.isfinite(shaped).sum(-1) == sampling.top_k).all()


def test_sampled_tokens_have_entropy_of_their_distribution_and_mean_ratio_1(batch: RolloutBatch) -> None:
    assert batch.rollout_log_probs is not None
    assert batch.trainer_log_probs is not None
    assert batch.entropy is not None
    excess = -batch.rollout_log_probs.astype(np.float64) - batch.entropy
    assert abs(excess.mean()) < 4 * excess.std() / np.sqrt(excess.size)
    assert np.exp(batch.trainer_log_probs - batch.rollout_log_probs).mean() == pytest.approx(1.0, abs=0.01)
    assert lint_batch(batch).is_clean


def test_row_counts_right_names_apart_from_others(batch: RolloutBatch) -> None:
    row = Row("shift trainer -1, NaN end")
    _, edit = EDITS[row.name]
    row.see(("middle", 128), lint_batch(edit(batch, np.random.default_rng(0))))
    row.see(("middle", 128), lint_batch(batch))
    assert (row.named["middle", 128], row.batches["middle", 128]) == (1, 2)
    assert row.beside == {"non_finite_log_probs": 1}
    assert row.reached
    assert not Row("bypass", row.batches, row.named).reached


def test_every_expected_name_is_a_check() -> None:
    assert {name for defect in DEFECTS for name in defect.right} <= set(CHECKS)
