"""Rows in another order, and other large mismatches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreshock.lint import collect_evidence, lint_batch, run_checks
from foreshock.rollouts import RolloutBatch
from tests.foreshock.lint.conftest import real_mu, real_pi
from tests.foreshock.lint.healthy import healthy_batch


@pytest.fixture
def batch() -> RolloutBatch:
    return healthy_batch(0, groups=16, per_group=4, longest=60)


def with_rows(batch: RolloutBatch, order: np.ndarray) -> RolloutBatch:
    """Return the batch with log π of rollout `order[i]` in row i, 0 where that one is shorter."""
    pi, offsets = real_pi(batch), batch.response_offsets
    moved = np.zeros_like(pi)
    for row, other in enumerate(order.tolist()):
        values = pi[offsets[other] : offsets[other + 1]][: offsets[row + 1] - offsets[row]]
        moved[offsets[row] : offsets[row] + values.size] = values
    return replace(batch, trainer_log_probs=moved)


@pytest.mark.parametrize("how", ["by length", "reversed", "some"])
def test_rows_in_another_order_are_proven(batch: RolloutBatch, how: str) -> None:
    rows = np.arange(batch.num_rollouts)
    order = {"by length": np.argsort(batch.response_lengths, kind="stable"), "reversed": rows[::-1]}.get(how, rows)
    if how == "some":
        order = rows.copy()
        order[:24] = np.roll(order[:24], 1)
    report = lint_batch(with_rows(batch, order))
    finding = next(each for each in report.warnings if each.name == "rows_exchanged")
    assert finding.severity == "critical"
    assert finding.seen.startswith("log π of ")
    assert "fits log μ of another rollout of the batch: mean |d| is" in finding.seen
    assert "log π fits log μ of" in finding.where[0].text
    assert "tokens_without_trainer" not in [each.name for each in report.warnings]
    whole = with_rows(batch, order)
    parts = [collect_evidence(whole.select(rows[start : start + 32])) for start in (0, 32)]
    names = [each.name for each in run_checks(parts[0].merge(parts[1])).warnings]
    # A shard knows its own rows only.
    assert ("rows_exchanged" in names) == (how != "reversed")


def test_another_large_mismatch_is_no_other_order(batch: RolloutBatch) -> None:
    random = np.random.default_rng(0)
    noisy = np.minimum(real_pi(batch) + random.normal(0, 1.0, batch.num_tokens), 0).astype(np.float32)
    shuffled = real_mu(batch)[random.permutation(batch.num_tokens)]
    constant = np.full(batch.num_tokens, -2.0, np.float32)
    for pi in (noisy, shuffled, constant, real_pi(batch)):
        names = [each.name for each in lint_batch(replace(batch, trainer_log_probs=pi)).warnings]
        assert "rows_exchanged" not in names
