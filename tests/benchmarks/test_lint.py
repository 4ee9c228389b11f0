"""The lint's benchmark: its laws are laws, its healthy rollouts are healthy, and it counts what it says it counts."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lint import DEFECTS, Row
from benchmarks.lint_defects import EDITS
from benchmarks.lint_rollouts import PLAIN, Law, Logged, Shape, World, batches_of, draw, normalised
from foreshock.lint import CHECKS, lint_batch
from foreshock.rollouts import RolloutBatch

SHAPE = Shape(rollouts=64, groups=8, limit=100)


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    world = World(1.0, -2.0)
    return batches_of(draw(world, PLAIN, SHAPE, 1), SHAPE, Logged())[0]


@pytest.mark.parametrize(
    "law", [Law(temperature=0.5), Law(top_p=0.8), Law(top_k=3), Law(min_p=0.2), Law(temperature=0)]
)
def test_a_law_adds_up_to_1_and_keeps_the_likeliest(law: Law) -> None:
    plain = normalised(np.random.default_rng(0).normal(0, 2, (200, 12)))
    shaped = law.of(plain)
    np.testing.assert_allclose(np.exp(shaped).sum(-1), 1.0)
    assert (shaped.argmax(-1) == plain.argmax(-1)).all()
    kept = np.where(np.isfinite(shaped), np.exp(plain), 0.0)
    if law.top_p < 1:
        least = np.where(np.isfinite(shaped), np.exp(plain), 1.0).min(-1)
        assert (kept.sum(-1) >= law.top_p).all()
        assert (kept.sum(-1) - least < law.top_p).all()
    if law.top_k:
        assert (np.isfinite(shaped).sum(-1) == law.top_k).all()


def test_drawn_tokens_have_the_entropy_of_their_law_and_a_mean_ratio_of_1(batch: RolloutBatch) -> None:
    assert batch.rollout_log_probs is not None
    assert batch.trainer_log_probs is not None
    assert batch.entropy is not None
    excess = -batch.rollout_log_probs.astype(np.float64) - batch.entropy
    assert abs(excess.mean()) < 4 * excess.std() / np.sqrt(excess.size)
    assert np.exp(batch.trainer_log_probs - batch.rollout_log_probs).mean() == pytest.approx(1.0, abs=0.01)
    assert lint_batch(batch).is_clean


def test_a_row_counts_right_names_apart_from_others(batch: RolloutBatch) -> None:
    row = Row("shift trainer -1, NaN end")
    _, edit = EDITS[row.name]
    row.see(("middle", 128), lint_batch(edit(batch, np.random.default_rng(0))))
    row.see(("middle", 128), lint_batch(batch))
    assert (row.named["middle", 128], row.batches["middle", 128]) == (1, 2)
    assert row.beside == {"non_finite_log_probs": 1}
    assert row.reached
    assert not Row("bypass", row.batches, row.named).reached


def test_every_name_that_is_expected_is_a_check() -> None:
    assert {name for defect in DEFECTS for name in defect.right} <= set(CHECKS)
