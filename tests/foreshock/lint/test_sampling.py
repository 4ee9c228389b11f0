"""The checks of the sampling distribution, on a policy that samples with temperature and top-p."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foreshock.api.steps import LintWarningRecord
from foreshock.lint import lint_batch
from foreshock.rollouts import BatchAttributes, RolloutBatch
from tests.foreshock.lint.healthy import Policy, healthy_batch, sampled_batch
from tests.foreshock.lint.test_corruptions import rounded_to_bfloat16


def warnings_of(batch: RolloutBatch) -> dict[str, LintWarningRecord]:
    return {warning.name: warning for warning in lint_batch(batch).warnings}


def test_plain_sampling_is_clean_and_tested() -> None:
    report = lint_batch(sampled_batch())
    assert report.is_clean, report.warnings
    assert [(check.state, check.why) for check in report.checks if check.name == "raw_log_probs"] == [("clean", "")]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"top_p": 0.9}, "truncation, or a temperature below 1"),
        ({"temperature": 0.7}, "truncation, or a temperature below 1"),
        ({"temperature": 1.5}, "a temperature above 1"),
    ],
)
def test_raw_log_probs_are_found_by_surprisal_alone(how: dict[str, float], words: str) -> None:
    warnings = warnings_of(sampled_batch(**how))
    assert set(warnings) == {"raw_log_probs"}, "mean ρ is 1 and d is small: no other check finds it"
    warning = warnings["raw_log_probs"]
    assert warning.severity == "critical"
    assert words in warning.seen
    assert abs(warning.evidence["surprisal_z"]) > 3
    assert abs(warning.evidence["mean_surprisal"] / warning.evidence["mean_entropy"] - 1) > 0.05


def test_raw_log_probs_of_declared_plain_sampling_are_no_cause() -> None:
    """Raw log-probs at temperature 1 without truncation are μ: the entropies or the declaration is wrong."""
    plain = BatchAttributes(temperature=1.0, top_p=1.0, top_k=-1, logprobs_mode="raw_logprobs")
    warnings = warnings_of(replace(sampled_batch(temperature=0.7), attributes=plain))
    assert set(warnings) == {"entropy_of_trainer"}
    assert warnings["entropy_of_trainer"].title == "`entropy` contradicts the declared sampling"
    assert "generation_config" in warnings["entropy_of_trainer"].seen


def test_entropies_of_the_engine_show_that_it_did_not_sample_as_declared() -> None:
    declared = BatchAttributes(temperature=1.0, logprobs_mode="raw_logprobs", entropy_policy="rollout")
    warnings = warnings_of(replace(sampled_batch(top_p=0.9), attributes=declared))
    assert set(warnings) == {"raw_log_probs"}
    found = warnings["raw_log_probs"]
    assert found.title == "the engine did not sample as declared: the logged μ is not the sampling distribution"
    assert "but temperature 1 is declared, and `entropy` as the engine's" in found.seen
    assert "generation_config.json" in found.remedy
    assert lint_batch(replace(sampled_batch(), attributes=declared)).is_clean
    untruncated = replace(declared, top_p=1.0, entropy_policy=None)
    other = warnings_of(replace(sampled_batch(top_p=0.9), attributes=untruncated))["entropy_of_trainer"]
    assert "but temperature 1 without truncation is declared" in other.seen
    assert other.remedy.startswith("Compare the temperature")


def test_exact_zeros_here_and_there_are_no_log_probs_and_no_raw_ones() -> None:
    """Speculative decoding that logs 0 for accepted tokens: the surprisals are too small, and sampling is not why."""
    batch = sampled_batch()
    assert batch.rollout_log_probs is not None
    behaviour = batch.rollout_log_probs.copy()
    accepted = (np.random.default_rng(4).random(behaviour.size) < 0.5) & (behaviour < -0.5)
    behaviour[accepted] = 0.0
    warnings = warnings_of(replace(batch, rollout_log_probs=behaviour))
    assert "raw_log_probs" not in warnings
    assert "accepted draft tokens" in warnings["tokens_without_engine"].seen


def test_processed_log_probs_under_truncation_have_mean_ratio_below_1() -> None:
    batch = sampled_batch(top_p=0.8, processed=True)
    warning = warnings_of(batch)["processed_log_probs"]
    assert warning.severity == "critical"
    assert warning.evidence["mean_ratio"] < 0.95
    assert warning.evidence["certain_under_mu_only"] > 50
    assert "log π" in warning.where[0].text
    # Declared sampling or missing entropies do not change the result.
    declared = replace(batch, attributes=BatchAttributes(top_p=0.8, logprobs_mode="processed_logprobs"), entropy=None)
    assert set(warnings_of(declared)) == {"processed_log_probs"}


def padded(share: float, noise: float = 0.0, **attributes: Any) -> RolloutBatch:
    """Return a batch whose trainer spends a share of its softmax on ids that the engine does not have."""
    batch = healthy_batch(3, Policy(noise=noise), attributes=BatchAttributes(**attributes), entropy=None)
    assert batch.trainer_log_probs is not None
    return replace(batch, trainer_log_probs=batch.trainer_log_probs + np.float32(np.log1p(-share)))


PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize(("share", "noise"), [(0.11, 1e-3), (0.025, 0.01)])
def test_padding_rows_in_the_softmax_are_no_truncation(mode: str, share: float, noise: float) -> None:
    found = warnings_of(padded(share, noise, **PLAIN, logprobs_mode=mode))
    assert set(found) == {"mass_outside"}
    assert f"{100 * share:.2g}" in found["mass_outside"].title
    assert "slice the trainer's logits" in found["mass_outside"].remedy


def test_what_is_not_declared_may_be_truncated_or_padded() -> None:
    found = warnings_of(padded(0.11, 1e-3))
    assert "mass_outside" not in found
    assert "or π's vocabulary is padded" in found["processed_log_probs"].title
    # Tokens that are certain under μ only are no padding.
    assert "padded" not in warnings_of(sampled_batch(top_p=0.8, processed=True))["processed_log_probs"].title


@pytest.mark.parametrize("seed", range(3))
def test_noise_of_both_signs_puts_no_mass_outside(seed: int) -> None:
    batch = padded(0.0, 0.05, **PLAIN)
    assert batch.trainer_log_probs is not None
    noise = np.random.default_rng(seed).normal(-0.045, 0.3, batch.num_tokens).astype(np.float32)
    noisy = replace(batch, trainer_log_probs=np.minimum(batch.trainer_log_probs + noise, 0.0))
    assert "mass_outside" not in warnings_of(noisy)


@pytest.mark.parametrize(("temperature", "is_differing"), [(0.6, True), (1.0, False)])
def test_temperature_beside_a_truncation_is_named_with_it(temperature: float, is_differing: bool) -> None:
    policy = Policy(vocabulary=96, temperature=temperature, top_p=0.9, processed=True)
    plain = BatchAttributes(temperature=1.0, top_p=1.0, logprobs_mode="processed_logprobs")
    found = warnings_of(healthy_batch(1, policy, longest=40, entropy=None, attributes=plain))
    assert "processed_log_probs" in found
    assert ("temperatures_differ" in found) == is_differing
    if is_differing:
        assert "as if μ were truncated too" in found["temperatures_differ"].seen


@pytest.mark.parametrize("top_p", [0.95, 0.98])
@pytest.mark.parametrize("mismatch", [0.0, 0.05])
def test_light_truncation_is_found_beside_a_mismatch_of_both_signs(top_p: float, mismatch: float) -> None:
    batch = replace(sampled_batch(top_p=top_p, processed=True), entropy=None)
    assert batch.trainer_log_probs is not None
    # E ρ of the noise is 1, so that it leaves the mean.
    noise = np.random.default_rng(1).normal(-(mismatch**2) / 2, mismatch, batch.num_tokens).astype(np.float32)
    warnings = warnings_of(replace(batch, trainer_log_probs=batch.trainer_log_probs + noise))
    assert warnings["processed_log_probs"].severity == "critical"
    assert -0.03 < warnings["processed_log_probs"].evidence["mean_ratio"] - 1 < -0.002


def test_light_truncation_is_found_in_bfloat16() -> None:
    batch = replace(sampled_batch(top_p=0.95, processed=True), entropy=None)
    assert batch.rollout_log_probs is not None
    short = rounded_to_bfloat16(batch.rollout_log_probs)
    assert {"processed_log_probs", "rounded_log_probs"} <= set(warnings_of(replace(batch, rollout_log_probs=short)))


def test_temperature_of_trainer_beside_raw_log_probs_moves_mean_ratio() -> None:
    batch = sampled_batch(temperature=0.6, trainer_scale=1 / 0.6)
    warnings = warnings_of(replace(batch, entropy=None))
    assert set(warnings) == {"mean_ratio", "temperatures_differ", "sampling_not_declared"}
    warning = warnings["mean_ratio"]
    assert warning.evidence["mean_ratio"] > 1.02
    assert "Student's t: " in warning.seen
    assert "95 %" not in warning.seen
    assert "16 prompt groups" in warning.seen


def test_processed_log_probs_with_same_temperature_in_trainer_are_clean() -> None:
    batch = sampled_batch(temperature=0.6, trainer_scale=1 / 0.6, processed=True)
    attributes = BatchAttributes(temperature=0.6, logprobs_mode="processed_logprobs")
    assert lint_batch(replace(batch, entropy=None, attributes=attributes)).is_clean


def test_few_tokens_or_groups_are_not_checked() -> None:
    batch = sampled_batch(top_p=0.9)
    few = lint_batch(batch.select(range(0, 512, 64)))
    assert few.is_clean
    assert "needs more tokens" in {check.name: check.why for check in few.not_checked}["raw_log_probs"]
    one_group = {check.name: check.why for check in lint_batch(batch.select(range(32))).not_checked}
    assert "needs 4 prompt groups, and there are 1" in one_group["raw_log_probs"]
    assert "needs 4 prompt groups" in one_group["mean_ratio"]


def test_versions_without_that_of_the_trainer_leave_the_lag_unknown() -> None:
    batch = replace(sampled_batch(), entropy=None)
    versions = np.zeros(batch.num_tokens, np.int32)
    plain = BatchAttributes(temperature=1.0, top_p=1.0, logprobs_mode="raw_logprobs")
    alone = replace(batch, weights_version=versions, attributes=plain)
    assert set(warnings_of(alone)) == {"lag_unknown"}
    known = replace(alone, attributes=replace(plain, trainer_weights_version=1))
    assert warnings_of(known) == {}


@pytest.mark.parametrize("attributes", [BatchAttributes(), BatchAttributes(temperature=1.0, top_p=1.0)])
def test_log_probs_of_the_likeliest_token_are_named_and_no_raw_ones(attributes: BatchAttributes) -> None:
    batch = healthy_batch(4, Policy(sharpness=1.5, noise=0.01))
    assert batch.rollout_log_probs is not None
    logged = np.maximum(batch.rollout_log_probs, np.float32(-0.5))
    found = warnings_of(replace(batch, rollout_log_probs=logged, attributes=attributes))
    assert "likelier_token_logged" in found
    assert not found.keys() & {"raw_log_probs", "mean_ratio", "mismatch_everywhere", "temperatures_differ"}
    assert found["likelier_token_logged"].evidence["mean_ratio"] < 1
