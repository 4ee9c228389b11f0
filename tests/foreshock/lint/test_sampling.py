"""The checks that ask whether the logged μ sampled, on a real model that samples with real temperature and top-p."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foreshock.lint import LintWarning, lint_batch
from foreshock.rollouts import BatchAttributes, RolloutBatch
from tests.foreshock.lint.sampled import Sampling, sample


def warnings_of(batch: RolloutBatch) -> dict[str, LintWarning]:
    return {warning.name: warning for warning in lint_batch(batch).warnings}


def test_plain_sampling_is_clean_and_tested() -> None:
    report = lint_batch(sample(Sampling()))
    assert report.is_clean, report.warnings
    assert [(check.state, check.why) for check in report.checks if check.name == "raw_log_probs"] == [("clean", "")]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (Sampling(top_p=0.9), "truncation, or a temperature below 1"),
        (Sampling(temperature=0.7), "truncation, or a temperature below 1"),
        (Sampling(temperature=1.5), "a temperature above 1"),
    ],
)
def test_raw_log_probs_look_perfect_but_for_their_surprisal(how: Sampling, words: str) -> None:
    warnings = warnings_of(sample(how))
    assert set(warnings) == {"raw_log_probs"}, "mean ρ is 1 and d is small: nothing else can see it"
    warning = warnings["raw_log_probs"]
    assert warning.severity == "critical"
    assert words in warning.seen
    assert abs(warning.evidence["surprisal_z"]) > 3
    assert abs(warning.evidence["mean_surprisal"] / warning.evidence["mean_entropy"] - 1) > 0.05


def test_processed_log_probs_of_a_truncated_law_pull_the_mean_of_rho_below_1() -> None:
    batch = sample(Sampling(top_p=0.8, processed=True))
    warning = warnings_of(batch)["processed_log_probs"]
    assert warning.severity == "critical"
    assert warning.evidence["mean_ratio"] < 0.95
    assert warning.evidence["certain_under_mu_only"] > 50
    assert "log π" in warning.where[0].text
    # Declared or not, and without entropies, it is seen by the same numbers.
    declared = replace(batch, attributes=BatchAttributes(top_p=0.8, logprobs_mode="processed_logprobs"), entropy=None)
    assert set(warnings_of(declared)) == {"processed_log_probs"}


def test_a_trainer_that_applies_a_temperature_which_raw_log_probs_lack_moves_the_mean_of_rho() -> None:
    batch = sample(Sampling(temperature=0.6, trainer_temperature=0.6))
    warnings = warnings_of(replace(batch, entropy=None))
    assert set(warnings) == {"mean_ratio"}
    warning = warnings["mean_ratio"]
    assert warning.evidence["mean_ratio"] > 1.02
    assert "95 % interval" in warning.seen
    assert "16 prompt groups" in warning.seen


def test_processed_log_probs_under_a_temperature_that_the_trainer_applies_too_are_right() -> None:
    batch = sample(Sampling(temperature=0.6, trainer_temperature=0.6, processed=True))
    attributes = BatchAttributes(temperature=0.6, logprobs_mode="processed_logprobs")
    assert lint_batch(replace(batch, entropy=None, attributes=attributes)).is_clean


def test_a_handful_of_tokens_or_of_groups_is_not_judged() -> None:
    batch = sample(Sampling(top_p=0.9))
    few = lint_batch(batch.select(range(0, 512, 64)))
    assert few.is_clean
    assert "needs more tokens" in {check.name: check.why for check in few.not_checked}["raw_log_probs"]
    one_group = {check.name: check.why for check in lint_batch(batch.select(range(32))).not_checked}
    assert "needs 4 prompt groups, and there are 1" in one_group["raw_log_probs"]
    assert "needs 4 prompt groups" in one_group["mean_ratio"]
