"""Defects in a part of the rollouts, at one end of each, or by a factor: each gives its own warning only."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foreshock.lint import LintEvidence, collect_evidence, lint_batch, run_checks
from foreshock.rollouts import BatchAttributes, RolloutBatch
from tests.foreshock.lint.conftest import real_mu, real_pi, recorded_steps
from tests.foreshock.lint.healthy import Policy, healthy_batch, sampled_batch
from tests.foreshock.lint.test_corruptions import not_checked, only, rounded_to_bfloat16, rounded_to_float16, shifted


def of_one_rank(batch: RolloutBatch) -> np.ndarray:
    """Return True for the tokens of the last quarter of the rollouts, [T]."""
    return np.repeat(np.arange(batch.num_rollouts), batch.response_lengths) >= 0.75 * batch.num_rollouts


@pytest.mark.parametrize("by", [1, -1])
def test_shift_in_rollouts_of_one_rank_is_a_shift_only(by: int) -> None:
    batch = healthy_batch(1)
    moved = np.where(of_one_rank(batch), shifted(real_pi(batch), batch.response_offsets, by), real_pi(batch))
    warning = only(lint_batch(replace(batch, trainer_log_probs=moved)), "shifted_log_probs")
    assert warning.severity == "critical"
    assert 16 <= warning.evidence["rollouts_preferring"] <= 32
    assert "in the others it does not" in warning.seen
    assert warning.title.endswith("in a part of the rollouts")


@pytest.mark.parametrize(("first", "found"), [(250, True), (500, False)])
def test_shift_in_a_part_of_a_large_batch_is_found_in_a_sample(first: int, found: bool) -> None:
    rollouts, tokens = 600, 500  # 300,000 tokens
    random = np.random.default_rng(1)
    mu = -random.exponential(0.5, (rollouts, tokens)).astype(np.float32)
    pi = np.minimum(mu + random.normal(0.0, 0.01, mu.shape), 0.0).astype(np.float32)
    pi[::4, first:-1] = pi[::4, first + 1 :]  # of a quarter of the rollouts, from one token on
    whole = RolloutBatch.from_arrays(
        [f"rollout-{row}" for row in range(rollouts)],
        prompt_offsets=np.arange(rollouts + 1),
        prompt_token_ids=np.ones(rollouts, np.int32),
        response_offsets=np.arange(rollouts + 1) * tokens,
        response_token_ids=random.integers(0, 32_000, mu.size).astype(np.int32),
        rollout_log_probs=mu.ravel(),
        trainer_log_probs=pi.ravel(),
    )
    warnings = [warning for warning in lint_batch(whole).warnings if warning.name == "shifted_log_probs"]
    assert len(warnings) == found
    for warning in warnings:
        assert warning.evidence["rollouts"] == rollouts
        assert warning.where
        for place in warning.where:
            row, start = int(place.sample_id.removeprefix("rollout-")), place.token
            assert row % 4 == 0
            assert start is not None
            assert f"log μ {' '.join(f'{value:.3g}' for value in mu[row, start : start + 4].tolist())}," in place.text


@pytest.mark.parametrize(("column", "word"), [("data_sources", "data source"), ("engine_ids", "engine")])
def test_rollouts_apart_are_named_by_their_data_source_or_engine(column: str, word: str) -> None:
    batch = healthy_batch(1)
    rows = np.arange(batch.num_rollouts)
    noise = np.random.default_rng(1).normal(0, 0.8, batch.num_tokens).astype(np.float32)
    moved = np.minimum(np.float32(-1e-3), real_pi(batch) + noise)
    off = np.where(np.repeat(rows % 4 == 3, batch.response_lengths), moved, real_pi(batch))
    named: list[str | None] = [f"replica-{row % 4}" for row in rows]
    columns: dict[str, Any] = {column: named}
    whole = replace(batch, trainer_log_probs=off, **columns)
    shards = [whole.select(part) for part in np.array_split(rows, 4)]
    merged = functools.reduce(LintEvidence.merge, map(collect_evidence, shards))
    merged = LintEvidence.from_bytes(merged.to_bytes(), merged.examples_to_json())
    for report in (lint_batch(whole), run_checks(merged)):
        found = {warning.name: warning.title for warning in report.warnings}
        assert f"rollouts of the {word} replica-3, and" in found["mismatch_by_place"]
    columns[column] = None
    unnamed = {warning.name: warning.title for warning in lint_batch(replace(whole, **columns)).warnings}
    assert word not in unnamed["mismatch_by_place"]


def test_shift_of_log_mu_is_not_padding() -> None:
    batch = healthy_batch(1)
    moved = shifted(real_mu(batch), batch.response_offsets, -1)
    only(lint_batch(replace(batch, rollout_log_probs=moved)), "shifted_log_probs")


def test_rollouts_copied_by_one_rank_are_found() -> None:
    batch = healthy_batch(2)
    copied = np.where(of_one_rank(batch), real_mu(batch), real_pi(batch))
    warning = only(lint_batch(replace(batch, trainer_log_probs=copied)), "identical_log_probs")
    assert warning.severity == "warning"
    assert 16 <= warning.evidence["copied_rollouts"] <= 32


@pytest.mark.parametrize(("round_to", "kind"), [(rounded_to_bfloat16, "bfloat16"), (rounded_to_float16, "float16")])
def test_rollouts_rounded_by_one_rank_are_found(round_to: object, kind: str) -> None:
    batch = healthy_batch(3)
    assert callable(round_to)
    short = np.where(of_one_rank(batch), round_to(real_pi(batch)), real_pi(batch))
    warning = only(lint_batch(replace(batch, trainer_log_probs=short)), "rounded_log_probs")
    assert f"fit into {kind}, and the others do not" in warning.seen


@pytest.mark.parametrize("column", ["rollout_log_probs", "trainer_log_probs"])
@pytest.mark.parametrize("base", [2, 10])
def test_other_log_base_is_named_with_its_column(column: str, base: int) -> None:
    steps = recorded_steps(1, 2, 3)
    report = lint_batch(replace(steps, **{column: getattr(steps, column) / np.float32(np.log(base))}))
    warning = only(report, "wrong_log_base")
    assert f"log {'μ' if column == 'rollout_log_probs' else 'π'} is in base {base}" in warning.seen
    assert "of different bases" in not_checked(report)["mean_ratio"]


def test_base_2_in_both_columns_is_found_by_entropy() -> None:
    steps = recorded_steps(1, 2, 3, 4)
    factor = np.float32(1 / np.log(2))
    both = replace(steps, rollout_log_probs=real_mu(steps) * factor, trainer_log_probs=real_pi(steps) * factor)
    assert "log-probs in base 2" in only(lint_batch(both), "raw_log_probs").seen


def padded(batch: RolloutBatch, pad: int) -> RolloutBatch:
    """Pad responses with a pad id, without a mask; the engine has 0 there, the trainer a score."""
    longest = int(batch.response_lengths.max())
    kept = np.arange(longest) < batch.response_lengths[:, None]
    columns: dict[str, Any] = {}
    for name, filling in (("rollout_log_probs", 0.0), ("trainer_log_probs", -4.1), ("entropy", 1.0)):
        values = np.full(kept.shape, filling, np.float32)
        values[kept] = getattr(batch, name)
        columns[name] = values.ravel()
    ids = np.full(kept.shape, pad, np.int32)
    ids[kept] = batch.response_token_ids
    offsets = np.arange(batch.num_rollouts + 1) * longest
    return replace(batch, response_token_ids=ids.ravel(), response_offsets=offsets, **columns)


def test_padding_scored_by_trainer_is_not_truncation() -> None:
    warning = only(lint_batch(padded(healthy_batch(4), 11)), "tokens_without_engine")
    assert "padding, or log-probs that the engine did not return" in warning.seen
    assert "id 11, log μ 0, log π -4.1" in warning.where[0].text


@pytest.mark.parametrize(("end", "words"), [("first", "each the first token"), ("last", "each the last token")])
def test_missing_log_mu_at_one_end_is_placed(end: str, words: str) -> None:
    batch = healthy_batch(5)
    places = batch.response_offsets[:-1] if end == "first" else batch.response_offsets[1:] - 1
    zero = real_mu(batch).copy()
    zero[places] = 0
    without = only(lint_batch(replace(batch, rollout_log_probs=zero)), "tokens_without_engine")
    assert words in without.seen
    assert ("or forced it" in without.title) == (end == "first")
    lost = np.where(zero == 0, np.float32(np.nan), zero)
    warning = only(lint_batch(replace(batch, rollout_log_probs=lost)), "non_finite_log_probs")
    assert f"each at the {end} token of its response" in warning.seen


def test_single_non_finite_value_is_not_a_pad_id() -> None:
    batch = healthy_batch(6, Policy(vocabulary=64))
    place = int(np.argmin(real_mu(batch)))
    lost = real_pi(batch).copy()
    lost[place] = -np.inf
    once = np.where(np.arange(batch.num_tokens) == place, np.int32(10_000), batch.response_token_ids)
    only(lint_batch(replace(batch, trainer_log_probs=lost, response_token_ids=once)), "non_finite_log_probs")


def test_a_column_of_nan_is_told_as_such() -> None:
    batch = healthy_batch(1)
    lost = np.full(batch.num_tokens, np.nan, np.float32)
    warning = only(lint_batch(replace(batch, trainer_log_probs=lost)), "non_finite_log_probs")
    assert warning.title == "all trainer_log_probs are NaN or infinite"
    assert warning.remedy.startswith("Weights or logits have become NaN")


@pytest.mark.parametrize("scale", [0.8, 1.25])
def test_entropy_of_lagging_trainer_is_not_raw_log_probs(scale: float) -> None:
    policy = Policy(sharpness=2.0, trainer_scale=scale, trainer_entropy=True)
    report = lint_batch(healthy_batch(7, policy, attributes=BatchAttributes()))
    warning = next(each for each in report.warnings if each.name == "entropy_of_trainer")
    # The lag of this test is a temperature, and looks like one.
    assert {each.name for each in report.warnings} == {"entropy_of_trainer", "temperatures_differ"}
    assert warning.severity == "warning"
    assert abs(warning.evidence["share_of_pi"]) < 0.05 < abs(warning.evidence["share_of_mu"])
    assert not_checked(report)["raw_log_probs"] == "the logged entropy is the trainer's, not the engine's"
    declared = lint_batch(healthy_batch(7, policy, attributes=BatchAttributes(entropy_policy="trainer")))
    assert {each.name for each in declared.warnings} == {"temperatures_differ"}
    assert [each.why for each in declared.checks if each.name == "entropy_of_trainer"] == ["as declared"]
    # The same policies with the entropies of μ.
    only(lint_batch(healthy_batch(7, replace(policy, trainer_entropy=False))), "temperatures_differ")


def test_declared_temperature_not_applied_by_trainer_is_found() -> None:
    batch = sampled_batch(temperature=0.6, processed=True)
    declared = BatchAttributes(temperature=0.6, logprobs_mode="processed_logprobs")
    warning = only(lint_batch(replace(batch, attributes=declared, entropy=None)), "temperature_of_trainer")
    assert warning.severity == "warning"
    assert warning.evidence["factor_at_unlikely"] < 1 < 1.3 < warning.evidence["factor_at_likely"]
    undeclared = lint_batch(replace(batch, attributes=BatchAttributes(), entropy=None))
    only(undeclared, "temperatures_differ")
    assert "declared" in not_checked(undeclared)["temperature_of_trainer"]


def test_same_tokens_in_another_order_are_not_a_duplicate() -> None:
    ids, values = [5, 6, 7, 6], [-3.0, -4.0, -2.0, -5.0]
    order = [2, 1, 0, 3]
    batch = RolloutBatch.from_lists(
        [f"row-{row}" for row in range(8)],
        [[1]] * 8,
        [ids, [ids[place] for place in order]] * 4,
        rollout_log_probs=[values, [values[place] for place in order]] * 4,
    )
    assert only(lint_batch(batch), "duplicated_rollouts").evidence["repeated"] == 6
    assert lint_batch(batch.select([0, 1])).is_clean


def test_equal_responses_of_every_prompt_suggest_temperature_0() -> None:
    batch = healthy_batch(8, groups=8, per_group=1, longest=20)
    again = batch.select(np.repeat(np.arange(8), 4))
    greedy = replace(again, sample_ids=[f"row-{row}" for row in range(32)], attributes=BatchAttributes())
    found = only(lint_batch(greedy), "duplicated_rollouts")
    assert found.title == "all samples of each prompt are the same response"
    rewarded = replace(greedy, group_ids=[f"g{row // 4}" for row in range(32)], reward=np.repeat(np.arange(8.0), 4))
    assert "no_reward_spread" not in [each.name for each in lint_batch(rewarded).warnings]
    assert not_checked(lint_batch(rewarded))["no_reward_spread"].startswith(found.title)
    assert "one seed for all samples of a prompt" in found.remedy
    assert "temperature 0" in found.remedy
    for temperature in (0.0, 1e-6):
        declared = BatchAttributes(temperature=temperature, logprobs_mode="processed_logprobs")
        assert "duplicated_rollouts" not in {
            each.name for each in lint_batch(replace(greedy, attributes=declared)).warnings
        }


def test_tokens_outside_the_declared_clip_range_are_counted() -> None:
    batch = healthy_batch(7, Policy(noise=0.3), attributes=BatchAttributes(clip_low=0.2, clip_high=0.28))
    info = next(each for each in lint_batch(batch).warnings if each.name == "clipped_before_update")
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    ratio = np.exp(batch.trainer_log_probs - batch.rollout_log_probs)
    assert info.evidence["clipped"] == ((ratio < 0.8) | (ratio > 1.28)).sum()
    assert "0.8 to 1.28" in info.seen
