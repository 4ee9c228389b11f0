"""k3 is judged per nat of entropy: of the tokens, or of a scalar that the trainer logged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreshock.api.steps import CheckRecord
from foreshock.lint import LintReport, lint_batch
from foreshock.rollouts import RolloutBatch
from tests.foreshock.lint.healthy import Policy, healthy_batch

CHECK = "k3_per_entropy"


def nearly_certain_batch(noise: float, groups: int = 16) -> RolloutBatch:
    """Return a batch whose policy has an entropy of about 0.01 nats, and a trainer with noise of this size."""
    random = np.random.default_rng(0)
    batch = healthy_batch(1, Policy(), groups=groups)
    behaviour = -random.gamma(0.2, 0.05, batch.num_tokens).astype(np.float32)
    target = np.minimum(behaviour + random.normal(0, noise, batch.num_tokens), 0).astype(np.float32)
    entropy = np.full(batch.num_tokens, 0.01, np.float32)
    return replace(batch, rollout_log_probs=behaviour, trainer_log_probs=target, entropy=entropy)


def outcome(report: LintReport) -> CheckRecord:
    return next(check for check in report.checks if check.name == CHECK)


def test_mismatch_of_a_nearly_certain_policy_is_found_though_k3_is_in_its_range() -> None:
    report = lint_batch(nearly_certain_batch(0.04), model_kind="dense")
    (warning,) = [each for each in report.warnings if each.name == CHECK]
    assert warning.evidence["k3"] < 1e-3
    assert warning.evidence["entropy"] == pytest.approx(0.01)
    assert warning.evidence["ratio"] > warning.evidence["ratio_low"] > 3e-2
    assert "up to 0.03 is healthy for a dense model" in warning.seen


def test_small_mismatch_and_mixtures_of_experts_of_the_same_mismatch_are_clean() -> None:
    assert outcome(lint_batch(nearly_certain_batch(0.01), model_kind="dense")).state == "clean"
    assert outcome(lint_batch(nearly_certain_batch(0.04), model_kind="moe")).state == "clean"
    assert outcome(lint_batch(nearly_certain_batch(0.04))).state == "clean"  # the kind is unknown


def test_scalar_is_used_if_tokens_have_no_entropy() -> None:
    batch = replace(nearly_certain_batch(0.04), entropy=None)
    assert outcome(lint_batch(batch, model_kind="dense")).state == "not checked"
    assert outcome(lint_batch(batch, entropy=1.0, model_kind="dense")).state == "clean"
    (warning,) = [each for each in lint_batch(batch, entropy=0.01, model_kind="dense").warnings if each.name == CHECK]
    assert "0.01 nats (a scalar of the trainer)" in warning.seen


def test_one_outlier_is_no_evidence() -> None:
    batch = nearly_certain_batch(0.0)
    assert batch.trainer_log_probs is not None
    target = batch.trainer_log_probs.copy()
    target[100] = -6.0
    report = lint_batch(replace(batch, trainer_log_probs=target), model_kind="dense")
    assert outcome(report).state == "clean"


def test_few_prompts_are_not_checked() -> None:
    check = outcome(lint_batch(nearly_certain_batch(0.04, groups=3), model_kind="dense"))
    assert (check.state, "needs 4 prompt groups" in check.why) == ("not checked", True)
