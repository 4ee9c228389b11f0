"""No false alarm: recorded runs, generated batches of any shape, and a thousand generated steps."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foreshock.lint import LintEvidence, collect_evidence, lint_batch, run_checks
from foreshock.rollouts import BatchAttributes, RolloutBatch
from tests.foreshock.batches import recorded_run, recorded_steps
from tests.foreshock.lint.conftest import recorded_step
from tests.foreshock.lint.healthy import Policy, healthy_batch

POLICIES = st.builds(
    Policy,
    sharpness=st.floats(0.5, 12.0),
    vocabulary=st.integers(2, 64),
    noise=st.floats(1e-6, 0.3),
)


def found(evidence: LintEvidence) -> list[str]:
    warnings = run_checks(evidence).warnings
    return [f"{warning.name}: {warning.seen}" for warning in warnings if warning.severity != "info"]


def test_recorded_run_is_clean_at_every_step_and_as_a_whole() -> None:
    steps = [collect_evidence(recorded_step(step)) for step in range(1, 161)]
    assert [found(step) for step in steps] == [[]] * 160
    whole = reduce(LintEvidence.merge, (step.across_steps() for step in steps))
    assert found(whole) == []
    assert [check.name for check in run_checks(whole).not_checked] == [
        "duplicated_rollouts",
        "same_response",
        "clipped_before_update",
        "advantages_against_rewards",
        "advantage_outlier",
        "groups_not_prompts",
        "no_reward_spread",
        "advantages_not_of_group",
    ]


@pytest.mark.shared
@pytest.mark.full
@pytest.mark.parametrize("run", ["healthy", "collapsed"])
def test_shared_runs_are_clean_at_every_step(run: str) -> None:
    # The collapsed run collapses because of its learning rate; its log-probs are valid.
    for step, batch in recorded_steps(recorded_run(run)):
        assert found(collect_evidence(batch)) == [], step


@pytest.mark.shared
def test_shared_run_reports_checks_not_made() -> None:
    _, batch = next(iter(recorded_steps(recorded_run("healthy"))))
    assert {check.name: check.why for check in lint_batch(batch).not_checked} == {
        "raw_log_probs": "the surprisal test needs rollout_log_probs and entropy",
        "entropy_of_trainer": "needs both log-probs and entropy",
        "temperature_of_trainer": "needs a declared temperature and logprobs_mode=processed_logprobs",
        "k3_per_entropy": "needs entropies, of the tokens or as a scalar of the step",
        "clipped_before_update": "needs both log-probs, and clip_low or clip_high among the batch attributes",
        "advantages_against_rewards": "needs reward, group_id and an advantage for each rollout, and groups with a "
        "spread",
        "advantage_outlier": "needs rewards and advantages",
        "advantages_not_of_group": "needs reward, group_id and an advantage for each rollout",
    }


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    policy=POLICIES,
    groups=st.integers(1, 12),
    per_group=st.integers(1, 16),
    longest=st.integers(1, 60),
)
@example(seed=0, policy=Policy(sharpness=1.0, vocabulary=24), groups=6, per_group=8, longest=5)
def test_healthy_batch_of_any_shape_is_clean(
    seed: int, policy: Policy, groups: int, per_group: int, longest: int
) -> None:
    batch = healthy_batch(seed, policy, groups=groups, per_group=per_group, longest=longest)
    assert found(collect_evidence(batch)) == []


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), policy=POLICIES, share=st.floats(0.0, 0.9))
def test_tool_tokens_without_values_are_clean(seed: int, policy: Policy, share: float) -> None:
    batch = healthy_batch(seed, policy)
    mask = (np.random.default_rng(seed).random(batch.num_tokens) >= share).astype(np.uint8)
    assert batch.rollout_log_probs is not None
    masked = replace(batch, response_mask=mask, rollout_log_probs=np.where(mask, batch.rollout_log_probs, 0))
    assert found(collect_evidence(masked)) == []


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("policy", [Policy(sharpness=2.0), Policy(sharpness=9.0, vocabulary=24, noise=0.1)])
def test_thousand_healthy_steps_give_no_warning(policy: Policy) -> None:
    whole: LintEvidence | None = None
    for step in range(500):
        evidence = collect_evidence(healthy_batch(step, policy, per_group=8, longest=20))
        assert found(evidence) == [], step
        whole = evidence.across_steps() if whole is None else whole.merge(evidence.across_steps())
    assert whole is not None
    assert found(whole) == []


@pytest.mark.parametrize("lag_noise", [0.3, 0.6])
def test_large_mismatch_gives_no_warning(lag_noise: float) -> None:
    # Stale weights with a k3 of 0.05 and 0.2 per token: a real mismatch, and valid log-probs.
    batch = healthy_batch(3, Policy(noise=lag_noise))
    assert found(collect_evidence(batch)) == []


def test_certain_policy_is_not_identical_log_probs() -> None:
    batch = healthy_batch(0)
    certain = np.zeros(batch.num_tokens, np.float32)
    sure = replace(batch, rollout_log_probs=certain, trainer_log_probs=certain.copy(), entropy=certain.copy())
    report = lint_batch(sure)
    assert report.is_clean
    assert "certain ones agree anyway" in {check.name: check.why for check in report.not_checked}["identical_log_probs"]


@pytest.mark.parametrize("missing", ["rollout_log_probs", "trainer_log_probs", "entropy", "group_ids"])
def test_missing_column_is_not_checked_and_gives_no_warning(missing: str) -> None:
    without: dict[str, Any] = {missing: None}
    report = lint_batch(replace(healthy_batch(0), **without, attributes=BatchAttributes()))
    assert report.is_clean
    expected = {
        "rollout_log_probs": {"identical_log_probs", "raw_log_probs", "mean_ratio", "duplicated_rollouts"},
        "trainer_log_probs": {"identical_log_probs", "mean_ratio", "shifted_log_probs", "tokens_without_trainer"},
        "entropy": {"raw_log_probs", "entropy_of_trainer"},
        "group_ids": set(),
    }[missing]
    assert expected <= {check.name for check in report.not_checked}
    assert all(check.why for check in report.not_checked)


def test_batch_without_tokens_is_clean() -> None:
    empty = RolloutBatch.from_lists(["a", "b"], [[1], [2]], [[], []], rollout_log_probs=[[], []])
    assert lint_batch(empty).is_clean
