"""A log π that was computed after an update on the same rollouts follows their advantages; noise and lags do not."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest

from foreshock.lint import LintEvidence, collect_evidence, lint_batch, run_checks
from foreshock.rollouts import BatchAttributes, RolloutBatch
from tests.foreshock.lint.conftest import real_mu, real_pi
from tests.foreshock.lint.healthy import Policy, healthy_batch
from tests.foreshock.lint.test_corruptions import names, only


def rewarded(seed: int, **how: Any) -> RolloutBatch:
    """Return 128 healthy rollouts of 16 prompts with rewards and advantages of their groups."""
    batch = healthy_batch(seed, Policy(sharpness=2.0), groups=16, per_group=8, **how)
    reward = (np.random.default_rng(seed).random((16, 8)) < 0.5).astype(np.float32)
    advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-4)
    return replace(batch, reward=reward.ravel(), advantage=advantage.ravel().astype(np.float32))


def updated(batch: RolloutBatch, rate: float, spread: float = 0.0) -> RolloutBatch:
    """Return a batch whose π was moved by an update: the logit of each sampled id rises by the rate times advantage.

    `spread` is the deviation of a part of the rise of each rollout that its advantage does not make.
    """
    assert batch.advantage is not None
    random = np.random.default_rng(9)
    of_rows = rate * batch.advantage + random.normal(0.0, spread, batch.num_rollouts)
    rise = np.repeat(of_rows, batch.response_lengths)
    pi = real_pi(batch) + rise - np.log1p(np.exp(real_pi(batch)) * np.expm1(rise))
    return replace(batch, trainer_log_probs=pi.astype(np.float32))


@pytest.mark.parametrize("seed", range(5))
def test_log_pi_after_the_update_is_named(seed: int) -> None:
    batch = updated(rewarded(seed), 0.2)
    warning = only(lint_batch(batch), "taken_after_update")
    assert warning.evidence["d_above"] > 0.05 > -0.05 > warning.evidence["d_below"]
    assert "before the optimizer's step" in warning.remedy
    assert only(lint_batch(replace(batch, advantage=None)), "taken_after_update")
    per_token = np.repeat(np.asarray(batch.advantage), batch.response_lengths)
    assert only(lint_batch(replace(batch, advantage=per_token, advantage_per_token=True)), "taken_after_update")
    groups = np.arange(128) // 8
    parts = [collect_evidence(batch.select(np.flatnonzero(groups % 4 == part))) for part in range(4)]
    merged = only(run_checks(reduce(LintEvidence.merge, parts)), "taken_after_update")
    assert merged.evidence == pytest.approx(warning.evidence)


@pytest.mark.parametrize("seed", range(20))
def test_healthy_rollouts_with_advantages_are_clean(seed: int) -> None:
    assert not names(lint_batch(rewarded(seed)))


@pytest.mark.parametrize("seed", range(10))
def test_part_of_the_difference_that_improvement_makes_is_no_finding(seed: int) -> None:
    # The correlation is about 0.4, as with weights that are some updates older.
    assert not names(lint_batch(updated(rewarded(seed), 0.1, spread=0.25)))


@pytest.mark.parametrize("seed", range(5))
def test_rollouts_of_older_weights_are_left_out(seed: int) -> None:
    batch = updated(rewarded(seed), 0.2)
    versions = np.full(batch.num_tokens, 8, np.int32)
    attributes = BatchAttributes(trainer_weights_version=9)
    assert not names(lint_batch(replace(batch, weights_version=versions, attributes=attributes)))
    now = replace(batch, weights_version=versions + 1, attributes=attributes)
    assert only(lint_batch(now), "taken_after_update")


@pytest.mark.parametrize("seed", range(5))
def test_mismatch_in_badly_rewarded_rollouts_only_is_no_update(seed: int) -> None:
    batch = rewarded(seed)
    assert batch.advantage is not None
    bad = np.repeat(batch.advantage < 0, batch.response_lengths)
    noise = np.random.default_rng(seed).normal(-0.32, 0.8, bad.size) * bad
    off = np.minimum(real_mu(batch) + noise, -1e-3).astype(np.float32)
    assert "taken_after_update" not in names(lint_batch(replace(batch, trainer_log_probs=off)))
