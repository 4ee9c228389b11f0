"""Each check finds its defect in recorded rollouts, and reports its numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foreshock.api.steps import LintWarningRecord
from foreshock.lint import CHECKS, LintReport, collect_evidence, lint_batch, run_checks
from foreshock.lint.checks.duplicates import COPIES, DUPLICATED
from foreshock.rollouts import BatchAttributes, RolloutBatch
from tests.foreshock.lint.conftest import real_mu, real_pi, recorded_step, recorded_steps
from tests.foreshock.lint.healthy import healthy_batch, log_softmax


def names(report: LintReport) -> set[str]:
    return {warning.name for warning in report.warnings if warning.severity != "info"}


def only(report: LintReport, name: str) -> LintWarningRecord:
    """Return the only warning of a report; it must have this name."""
    assert names(report) == {name}, [f"{warning.name}: {warning.seen}" for warning in report.warnings]
    return report.warnings[0]


def not_checked(report: LintReport) -> dict[str, str]:
    return {check.name: check.why for check in report.not_checked}


def shifted(values: np.ndarray, offsets: np.ndarray, by: int) -> np.ndarray:
    """Return each rollout's values moved by one place, as by a wrong slice; 0 fills the free place."""
    moved = np.zeros_like(values)
    for start, end in itertools.pairwise(offsets.tolist()):
        row = values[start:end]
        moved[start:end] = np.concatenate([[0], row[:-1]]) if by > 0 else np.concatenate([row[1:], [0]])
    return moved


def rounded_to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def rounded_to_float16(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def test_copied_column_is_identical_log_probs(step: RolloutBatch) -> None:
    copied = replace(step, trainer_log_probs=real_mu(step).copy(), attributes=BatchAttributes())
    warning = only(lint_batch(copied), "identical_log_probs")
    assert warning.severity == "critical"
    assert warning.evidence["tokens"] == step.num_tokens
    assert "1,120 differences are exactly 0" in warning.seen
    assert not_checked(lint_batch(copied))["mean_ratio"] == "the two log-probs are the same numbers"


def test_declared_bypass_is_a_warning_and_not_critical(step: RolloutBatch) -> None:
    attributes = BatchAttributes(trainer_policy="bypass")
    copied = replace(step, trainer_log_probs=real_mu(step).copy(), attributes=attributes)
    warning = only(lint_batch(copied), "identical_log_probs")
    assert warning.severity == "warning"
    assert "bypass is declared" in warning.seen


@pytest.mark.parametrize(("by", "neighbour", "other"), [(1, "earlier", "t − 1"), (-1, "later", "t + 1")])
def test_shift_by_one_token_is_found_in_both_directions(
    step: RolloutBatch, by: int, neighbour: str, other: str
) -> None:
    moved = shifted(real_pi(step), step.response_offsets, by)
    report = lint_batch(replace(step, trainer_log_probs=moved))
    assert "shifted_log_probs" in names(report)
    warning = next(each for each in report.warnings if each.name == "shifted_log_probs")
    assert warning.severity == "critical"
    assert f"log μ of token {other}" in warning.seen
    assert warning.evidence[f"mean_gap_{neighbour}"] < 0.05 * warning.evidence["mean_gap"]
    assert "different tokens" in not_checked(report)["mean_ratio"]


@pytest.mark.parametrize("column", ["rollout_log_probs", "trainer_log_probs"])
def test_probabilities_are_named_and_dependent_checks_are_not_made(step: RolloutBatch, column: str) -> None:
    exponentiated = np.exp(getattr(step, column))
    report = lint_batch(replace(step, **{column: exponentiated}))
    warning = only(report, "probabilities_as_log_probs")
    assert column in warning.seen
    assert "np.log" in warning.remedy
    assert not_checked(report)["mean_ratio"] == f"the {column} column holds no log-probs"


def test_losses_are_negated_log_probs(step: RolloutBatch) -> None:
    assert only(lint_batch(replace(step, rollout_log_probs=-real_mu(step))), "negated_log_probs").severity == "critical"


@pytest.mark.parametrize(("of_response", "said"), [(np.cumsum, "never rises in"), (np.mean, "has one value in")])
@pytest.mark.parametrize("column", ["rollout_log_probs", "trainer_log_probs"])
def test_numbers_of_whole_responses_are_named(
    step: RolloutBatch, column: str, of_response: Callable[[Any], Any], said: str
) -> None:
    values = getattr(step, column).copy()
    for first, end in itertools.pairwise(step.response_offsets):
        values[first:end] = of_response(values[first:end])
    assert said in only(lint_batch(replace(step, **{column: values})), "response_log_probs").seen


@pytest.mark.parametrize(("first", "found"), [(8, True), (30, False)])
def test_missing_mass_at_the_first_tokens_only_is_a_ban(first: int, found: bool) -> None:
    batch = healthy_batch(1, per_group=32)
    index = np.arange(batch.num_tokens) - np.repeat(batch.response_offsets[:-1], batch.response_lengths)
    renormalised = np.minimum(real_mu(batch) + np.where(index < first, 0.06, 0.0), 0.0).astype(np.float32)
    report = lint_batch(replace(batch, rollout_log_probs=renormalised))
    assert ("banned_early" in names(report)) is found
    assert "mismatch_by_place" not in names(report)


def test_column_of_zeros_holds_no_log_probs() -> None:
    batch = healthy_batch(1, attributes=BatchAttributes(temperature=1.0, top_p=1.0))
    report = lint_batch(replace(batch, rollout_log_probs=np.zeros_like(real_mu(batch))))
    warning = next(each for each in report.warnings if each.name == "tokens_without_engine")
    assert " of all: the engine returned no log-probs. " in warning.seen


def test_probability_above_1_is_named_with_its_place(step: RolloutBatch) -> None:
    beyond = real_mu(step).copy()
    place = int(step.response_offsets[7]) + 1
    beyond[place] = 0.25
    warning = only(lint_batch(replace(step, rollout_log_probs=beyond)), "placeholder_log_probs")
    assert warning.evidence["rollout_placeholders"] == 1
    assert (warning.where[0].sample_id, warning.where[0].token) == (step.sample_ids[7], 1)
    assert "0.25" in warning.where[0].text


@pytest.mark.parametrize("column", ["rollout_log_probs", "trainer_log_probs"])
def test_log_probs_of_rounded_logits_may_be_above_0(column: str) -> None:
    batch = healthy_batch(3)
    values = getattr(batch, column).copy()
    likely = np.flatnonzero(values > -0.01)
    values[likely] = np.linspace(0.001, 0.06, likely.size, dtype=np.float32)
    warning = only(lint_batch(replace(batch, entropy=None, **{column: values})), "positive_log_probs")
    assert warning.severity == "warning"
    assert f"{likely.size:,} of {batch.num_tokens:,} values of {column}" in warning.seen
    assert "above 0, by at most 0.06, as of rounded logits; they are measured" in warning.seen


def test_non_finite_values_are_counted_by_kind(step: RolloutBatch) -> None:
    broken = real_pi(step).copy()
    broken[3:5], broken[9] = -np.inf, np.nan
    warning = next(
        each
        for each in lint_batch(replace(step, trainer_log_probs=broken)).warnings
        if each.name == "non_finite_log_probs"
    )
    assert warning.evidence == {"trainer_minus_inf": 2, "trainer_nan": 1}
    assert "1 NaN, 2 −inf of 1,120" in warning.seen
    assert len(warning.where) == 3


@pytest.mark.parametrize(("round_to", "kind"), [(rounded_to_bfloat16, "bfloat16"), (rounded_to_float16, "float16")])
@pytest.mark.parametrize("column", ["rollout_log_probs", "trainer_log_probs"])
def test_rounding_is_named_with_its_k3(
    step: RolloutBatch, column: str, round_to: Callable[[np.ndarray], np.ndarray], kind: str
) -> None:
    values = getattr(step, column)
    short: dict[str, Any] = {column: round_to(values)}
    warning = only(lint_batch(replace(step, **short)), "rounded_log_probs")
    assert f"fit into {kind}" in warning.seen
    # The reported k3 is that of the rounding itself, over the same tokens.
    seen = np.abs(values) > 0.01
    difference = values[seen].astype(np.float64) - short[column][seen]
    made = float((np.expm1(difference) - difference).mean())
    floor = warning.evidence[f"{column.removesuffix('_log_probs')}_k3_floor"]
    assert floor == pytest.approx(made, rel=0.2)


def sharp_batch(
    log_mu_of: Callable[[np.ndarray, np.ndarray], np.ndarray], scale: float, **columns: Any
) -> RolloutBatch:
    """Return 80 rollouts of 10 prompts of a sharp policy; `log_mu_of` its logits [T, V] and the ids [T] is log μ."""
    random = np.random.default_rng(2)
    logits = random.normal(0, scale, (8_000, 64)).astype(np.float32) + 20
    target = log_softmax(logits.astype(np.float64))
    ids = (random.random((8_000, 1)) > np.cumsum(np.exp(target), axis=1)).sum(1).clip(0, 63)
    return RolloutBatch.from_arrays(
        [f"rollout-{row}" for row in range(80)],
        np.arange(80) // 8,
        np.arange(81),
        ids,
        np.arange(81) * 100,
        rollout_log_probs=np.minimum(log_mu_of(logits, ids), 0).astype(np.float32),
        trainer_log_probs=target[np.arange(8_000), ids].astype(np.float32),
        group_ids=[f"prompt-{row // 8}" for row in range(80)],
        **columns,
    )


def bfloat16_log_softmax(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return log-probs [T] of a log-softmax in bfloat16: both the logit and the normaliser are rounded."""
    normaliser = np.log(np.exp(logits.astype(np.float64)).sum(1))
    chosen = rounded_to_bfloat16(logits[np.arange(ids.size), ids])
    return rounded_to_bfloat16(chosen - rounded_to_bfloat16(normaliser))


@pytest.mark.parametrize(
    ("scale", "attributes"),
    [
        (4.0, BatchAttributes()),
        (6.0, BatchAttributes(temperature=1.0, top_p=1.0, logprobs_mode="processed_logprobs")),
        (15.0, BatchAttributes()),
    ],
)
def test_log_softmax_in_bfloat16_is_rounding_and_no_truncation(scale: float, attributes: BatchAttributes) -> None:
    # Mean ρ is 1, and d is as often above 0 as below, though 3 % to 20 % of the tokens are certain under μ only.
    only(lint_batch(sharp_batch(bfloat16_log_softmax, scale, attributes=attributes)), "rounded_log_probs")


def test_log_probs_rounded_to_two_decimals_are_no_truncation() -> None:
    random = np.random.default_rng(0)
    mu = np.maximum(-np.exp(random.normal(-3, 2, 8_000)), -20)
    pi = np.minimum(mu + random.normal(0, 0.01, mu.size), 0).astype(np.float32)
    batch = sharp_batch(lambda logits, ids: np.round(mu, 2), 4.0)
    assert lint_batch(replace(batch, trainer_log_probs=pi)).is_clean


def test_rollouts_repeated_to_fill_a_batch_are_duplicates() -> None:
    # 120 rollouts padded to 128 by repeating the first, as for dispatch to a number of ranks.
    batch = healthy_batch(1, groups=15, per_group=8, longest=60).select([*range(120), *range(8)])
    padded = replace(batch, sample_ids=[f"row-{row}" for row in range(128)])
    warning = only(lint_batch(padded), "duplicated_rollouts")
    assert warning.evidence["repeated"] > 3
    assert warning.evidence["expected"] < 0.1
    assert "equals row-" in warning.where[0].text
    assert warning.title == DUPLICATED.title


def test_engines_that_share_a_seed_leave_few_different_samples_of_each_prompt() -> None:
    batch = healthy_batch(1, groups=15, per_group=8, longest=60)
    rows = np.arange(120) // 8 * 8 + np.arange(120) % 2  # each of four engines draws the same two
    warning = only(
        lint_batch(replace(batch.select(rows), sample_ids=[f"row-{row}" for row in range(120)])), "duplicated_rollouts"
    )
    assert warning.title == f"{COPIES}: 2 of 8 are different on average"
    assert "a seed that several engines" in warning.remedy


def test_batch_logged_twice_is_found_across_shards() -> None:
    # Most responses of this step are equal without being copies: the policy is certain of them.
    step = recorded_step(60)
    half = step.select(np.arange(64))
    again = replace(half, sample_ids=[f"again-{name}" for name in half.sample_ids])
    assert run_checks(collect_evidence(half)).is_clean
    both = collect_evidence(half).merge(collect_evidence(again))
    warning = only(run_checks(both), "duplicated_rollouts")
    assert warning.evidence["expected"] < 0.1 < warning.evidence["repeated"]


def test_sampled_pad_id_dropped_by_trainer_is_found() -> None:
    # At step 75 of the recorded run the model did sample id 0, which pads; a trainer that masks by id drops it.
    step = recorded_step(75)
    assert int((step.response_token_ids == 0).sum()) == 1
    dropped = np.where(step.response_token_ids == 0, np.float32(0), real_pi(step))
    warning = only(lint_batch(replace(step, trainer_log_probs=dropped)), "pad_id_sampled")
    assert (warning.evidence["token_id"], warning.evidence["sampled"], warning.evidence["dropped"]) == (0, 1, 1)
    assert "id 0" in warning.where[0].text


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_sampled_pad_id_with_non_finite_log_pi_is_found(value: float) -> None:
    steps = recorded_steps(75, 98, 107, 120, 130)
    dropped = np.where(steps.response_token_ids == 0, np.float32(value), real_pi(steps))
    report = lint_batch(replace(steps, trainer_log_probs=dropped))
    assert names(report) == {"pad_id_sampled", "non_finite_log_probs"}
    assert report.warnings[0].evidence["dropped"] == 5


def test_sampled_pad_id_dropped_by_mask_is_found() -> None:
    steps = recorded_steps(75, 98, 107, 120, 130)
    mask = (steps.response_token_ids != 0).astype(np.uint8)
    warning = only(lint_batch(replace(steps, response_mask=mask)), "pad_id_sampled")
    assert (warning.evidence["token_id"], warning.evidence["dropped"]) == (0, 5)
    assert "mask 0" in warning.seen


def test_responses_cut_by_trainer_are_not_a_pad_id() -> None:
    step = recorded_step(60)
    place = np.arange(step.num_tokens) - np.repeat(step.response_offsets[:-1], step.response_lengths)
    cut = np.where(place < 8, real_pi(step), np.float32(0))
    report = lint_batch(replace(step, trainer_log_probs=cut))
    assert "tokens_without_trainer" in names(report)
    assert "pad_id_sampled" not in names(report)


def test_masked_tokens_with_log_mu_and_advantages_are_found(step: RolloutBatch) -> None:
    # The mask declares the last two tokens of each response tool output; their values stay.
    place = np.repeat(step.response_offsets[1:], step.response_lengths) - np.arange(step.num_tokens)
    mask = (place > 2).astype(np.uint8)
    advantage = np.repeat(np.asarray(step.reward), step.response_lengths) - np.float32(0.3)
    careless = replace(step, response_mask=mask, advantage=advantage, advantage_per_token=True)
    warning = only(lint_batch(careless), "masked_values")
    assert warning.evidence["rollout"] == warning.evidence["masked"] == warning.evidence["advantage"] == 256
    assert "mask 0" in warning.where[0].text


@pytest.mark.parametrize("reason", ["length", "stop", None])
def test_truncated_responses_that_are_masked_as_a_whole_are_no_finding(step: RolloutBatch, reason: str | None) -> None:
    # Overlong filtering: no token of the truncated responses is in the loss.
    overlong = np.arange(step.num_rollouts) % 8 == 0
    mask = np.repeat(~overlong, step.response_lengths).astype(np.uint8)
    reasons = [reason if each else "stop" for each in overlong]
    advantage = np.repeat(np.asarray(step.reward), step.response_lengths) - np.float32(0.3)
    filtered = replace(step, response_mask=mask, finish_reasons=reasons, advantage=advantage, advantage_per_token=True)
    assert names(lint_batch(filtered)) == (set() if reason == "length" else {"masked_values"})
    if reason == "stop":
        assert only(lint_batch(filtered), "masked_values").title.endswith("were not cut and are masked as a whole")
    # A part of a truncated response is none of it.
    if reason == "length":
        mask[step.response_offsets[:-1]] = 1
        assert only(lint_batch(replace(filtered, response_mask=mask)), "masked_values")


def test_masked_tokens_scored_by_trainer_only_are_clean(step: RolloutBatch) -> None:
    place = np.repeat(step.response_offsets[1:], step.response_lengths) - np.arange(step.num_tokens)
    mask = (place > 2).astype(np.uint8)
    assert step.entropy is not None
    clean = replace(step, response_mask=mask, rollout_log_probs=np.where(mask, real_mu(step), np.float32(0)))
    assert lint_batch(clean).is_clean
    padded = replace(step, response_mask=mask, rollout_log_probs=np.where(mask, real_mu(step), np.float32(np.nan)))
    assert lint_batch(padded).is_clean


def test_placeholders_at_masked_tokens_are_counted_beside_others(step: RolloutBatch) -> None:
    place = np.repeat(step.response_offsets[1:], step.response_lengths) - np.arange(step.num_tokens)
    mask = (place > 2).astype(np.uint8)
    mu = np.where(mask, real_mu(step), 1)
    mu[np.flatnonzero(mask)[0]] = -9999
    warning = only(lint_batch(replace(step, response_mask=mask, rollout_log_probs=mu)), "placeholder_log_probs")
    assert warning.seen.endswith("256 placeholders at masked tokens are ignored.")


@pytest.mark.parametrize(
    ("attributes", "parameters"),
    [
        (BatchAttributes(temperature=0.7, logprobs_mode="raw_logprobs"), "temperature 0.7"),
        (BatchAttributes(temperature=1.0, top_p=0.9, logprobs_mode="raw_logprobs"), "top-p 0.9"),
        (BatchAttributes(top_k=20, min_p=0.05, logprobs_mode="raw_logprobs"), "top-k 20, min-p 0.05"),
    ],
)
def test_raw_log_probs_under_declared_sampling_are_found_without_surprisal_test(
    step: RolloutBatch, attributes: BatchAttributes, parameters: str
) -> None:
    warning = only(lint_batch(replace(step, attributes=attributes)), "raw_log_probs")
    # Only declared parameters are listed.
    assert warning.seen.startswith(
        f"128 of 128 rollouts were sampled with {parameters}, and the engine logs raw_logprobs"
    )


def test_sampling_columns_count_like_attributes(step: RolloutBatch) -> None:
    top_p = np.ones(128, np.float32)
    top_p[:5] = 0.95
    warning = only(lint_batch(replace(step, top_p=top_p)), "raw_log_probs")
    assert "5 of 128 rollouts were sampled with top-p 0.95" in warning.seen


def test_shaped_sampling_without_logprobs_mode_is_not_checked(step: RolloutBatch) -> None:
    report = lint_batch(replace(step, attributes=BatchAttributes(top_p=0.9), entropy=None))
    assert report.is_clean
    assert "logprobs_mode is not declared" in not_checked(report)["raw_log_probs"]
    assert "chance of equal responses is not known" in not_checked(report)["duplicated_rollouts"]


def test_certain_tokens_are_too_few_for_surprisal_test(step: RolloutBatch) -> None:
    certain = np.zeros(step.num_tokens, np.float32)
    sure = replace(step, rollout_log_probs=certain, trainer_log_probs=None, entropy=certain)
    report = lint_batch(replace(sure, attributes=BatchAttributes()))
    assert "0 nats of entropy do not suffice" in not_checked(report)["raw_log_probs"]


def test_every_check_has_effect_and_remedy() -> None:
    assert all(check.effect.endswith(".") and check.remedy.endswith((".", ")")) for check in CHECKS.values())
    assert all(not check.title.endswith(".") for check in CHECKS.values())
