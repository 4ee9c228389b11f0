"""Where the mismatch is: concentrations are named with their numbers, healthy structure is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest

from foreshock.lint import LintEvidence, collect_evidence, lint_batch, run_checks
from foreshock.lint.checks.places import Places, turns_of_mask
from foreshock.lint.checks.token_ids import TokenIds
from foreshock.rollouts import BatchAttributes, RolloutBatch
from tests.foreshock.lint.healthy import Policy, healthy_batch
from tests.foreshock.lint.test_corruptions import only

Where = Callable[[RolloutBatch], Any]


def batch_with(where: Where, size: float = 0.8, seed: int = 3, **columns: Any) -> RolloutBatch:
    """Return a healthy batch in which log π is off by normal noise of this size at chosen tokens."""
    return off(replace(healthy_batch(seed, Policy(sharpness=2.0)), **columns), where, size, seed)


def off(batch: RolloutBatch, where: Where, size: float = 0.8, seed: int = 3) -> RolloutBatch:
    assert batch.trainer_log_probs is not None
    # E ρ stays 1, as that of a normalised policy.
    noise = np.random.default_rng(seed).normal(-size * size / 2, size, batch.num_tokens) * where(batch)
    return replace(batch, trainer_log_probs=np.minimum(batch.trainer_log_probs + noise, -1e-3).astype(np.float32))


def positions(batch: RolloutBatch) -> Any:
    return np.arange(batch.num_tokens) - np.repeat(batch.response_offsets[:-1], batch.response_lengths)


def rows(batch: RolloutBatch) -> Any:
    return np.repeat(np.arange(batch.num_rollouts), batch.response_lengths)


def test_turn_is_named() -> None:
    batch = healthy_batch(3, Policy(sharpness=2.0))
    turn = (positions(batch) >= 12).astype(np.int16)
    title = only(lint_batch(batch_with(lambda each: positions(each) >= 12, turn=turn)), "mismatch_by_place").title
    assert "from turn 1 on" in title


def by_id(bias: Any, noise: float = 0.0) -> RolloutBatch:
    """Return a batch with a bias [V] by token id on log π, and noise."""
    batch = healthy_batch(3, Policy(vocabulary=64, sharpness=1.0))
    assert batch.trainer_log_probs is not None
    off = bias[batch.response_token_ids] + np.random.default_rng(5).normal(0.0, noise, batch.num_tokens)
    return replace(batch, trainer_log_probs=np.minimum(batch.trainer_log_probs + off, -1e-3).astype(np.float32))


def test_bias_by_token_id_is_named_with_its_share() -> None:
    bias = np.random.default_rng(1).normal(-0.2, 0.6, 64)
    finding = only(lint_batch(by_id(bias, 0.3)), "mismatch_by_place")
    assert "by token id: 75 %" in finding.title
    assert f"{np.argmin(bias)} (−" in finding.seen
    assert finding.evidence["share_low"] < bias.var() / (bias.var() + 0.09) < finding.evidence["share_high"]


def test_share_by_token_id_is_the_same_over_shards() -> None:
    batch = by_id(np.linspace(-1.0, 0.8, 64))
    half = batch.num_rollouts // 2
    parts = [collect_evidence(batch.select(np.arange(*each))) for each in ((0, half), (half, batch.num_rollouts))]
    whole, merged = collect_evidence(batch)[TokenIds], parts[0].merge(parts[1])[TokenIds]
    np.testing.assert_array_equal(whole.sums.keys, merged.sums.keys)
    np.testing.assert_allclose(whole.sums.values, merged.sums.values, rtol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_noise_alike_at_all_ids_is_not_by_token_id(seed: int) -> None:
    batch = batch_with(lambda each: np.ones(each.num_tokens), 0.8, seed)
    assert all("token id" not in each.title for each in lint_batch(batch).warnings)


def test_last_tokens_of_truncated_responses_are_named() -> None:
    batch = healthy_batch(3, Policy(sharpness=2.0))
    reasons = ["length" if row % 4 == 0 else "stop" for row in range(batch.num_rollouts)]

    def tail(each: RolloutBatch) -> Any:
        from_end = np.repeat(each.response_lengths, each.response_lengths) - positions(each)
        return (from_end <= 4) & (rows(each) % 4 == 0)

    title = only(lint_batch(batch_with(tail, 2.0, finish_reasons=reasons)), "mismatch_by_place").title
    assert "last 4 tokens of truncated responses" in title


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_minority_of_rollouts_is_named(share: float) -> None:
    def minority(each: RolloutBatch) -> Any:
        return rows(each) % round(1 / share) == 1

    warning = only(lint_batch(batch_with(minority)), "mismatch_by_place")
    assert "rollouts, and" in warning.title
    assert warning.evidence["share_of_k3"] > 0.9


def test_a_single_rollout_is_named_if_the_step_is_beyond_its_range() -> None:
    batch = healthy_batch(3, Policy(sharpness=2.0))
    row = int(np.argmax(batch.response_lengths))
    warning = only(lint_batch(batch_with(lambda each: rows(each) == row, 3.0)), "mismatch_by_place")
    assert "in 1 rollout, and" in warning.title
    assert warning.seen.endswith(f"It is {batch.sample_ids[row]}.")
    small = lint_batch(batch_with(lambda each: rows(each) == row, 0.05))
    assert "mismatch_by_place" not in {each.name for each in small.warnings}


def test_rollouts_that_go_wrong_inside_are_told_from_those_that_are_wrong_from_the_start() -> None:
    batch = healthy_batch(3, Policy(sharpness=2.0), longest=80)

    def some(each: RolloutBatch) -> Any:
        return rows(each) % 5 == 1

    inside = only(
        lint_batch(off(batch, lambda each: some(each) & (positions(each) >= 6 + rows(each) % 7), 2.0)),
        "mismatch_by_place",
    )
    assert "of them it begins inside the response" in inside.seen
    assert "inside" not in only(lint_batch(off(batch, some, 2.0)), "mismatch_by_place").seen


def with_prompts(lengths: Any, **sizes: int) -> RolloutBatch:
    """Return a healthy batch of prompts of these lengths, 8 rollouts of each."""
    batch = healthy_batch(3, Policy(sharpness=2.0), groups=len(lengths), per_group=8, **sizes)
    of_rollouts = np.repeat(np.asarray(lengths), 8)
    ids = np.repeat(np.arange(batch.num_rollouts) // 8, of_rollouts).astype(np.int32)
    return replace(batch, prompt_token_ids=ids, prompt_offsets=np.r_[0, np.cumsum(of_rollouts)])


def prompts_of(batch: RolloutBatch) -> Any:
    return np.repeat(np.diff(batch.prompt_offsets), batch.response_lengths)


VARIED = 4 + np.arange(32) * 7 % 23


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (lambda each: prompts_of(each) > 12, "rollouts with prompts longer than about 12 tokens, and"),
        (lambda each: prompts_of(each) <= 9, "rollouts with prompts of at most about 9 tokens, and"),
        (
            lambda each: prompts_of(each) + positions(each) >= 40,
            "from about token 40 of the context (prompt included) on",
        ),
        (lambda each: positions(each) >= 20, "from about token 20 of a response on"),
        (lambda each: (rows(each) // 8) % 5 == 1, "56 rollouts, and 1.3e−4 elsewhere: all those of 7 prompts"),
    ],
)
def test_length_that_separates_best_is_named(where: Where, words: str) -> None:
    batch = off(with_prompts(VARIED, longest=60), where)
    assert words in only(lint_batch(batch), "mismatch_by_place").title
    parts = [collect_evidence(batch.select(np.arange(part, 256, 3))) for part in range(3)]
    assert words in only(run_checks(reduce(LintEvidence.merge, parts)), "mismatch_by_place").title


def test_prompts_of_one_length_are_not_told_by_it() -> None:
    batch = off(with_prompts([14] * 32), lambda each: (rows(each) // 8) % 4 == 1)
    assert "all those of 8 prompts" in only(lint_batch(batch), "mismatch_by_place").title


def test_rise_with_lag_is_staleness() -> None:
    batch = healthy_batch(3, Policy(sharpness=2.0))
    lag = (rows(batch) // 8) % 4
    versions = (9 - lag).astype(np.int32)
    attributes = BatchAttributes(trainer_weights_version=9)
    found = batch_with(lambda each: 0.3 * lag, 1.0, weights_version=versions, attributes=attributes)
    warning = only(lint_batch(found), "mismatch_by_place")
    assert "lag" in warning.title
    assert "staleness" in warning.seen
    assert "token TIS" in warning.remedy


def test_large_mismatch_everywhere_is_an_info_without_a_cause() -> None:
    report = lint_batch(batch_with(lambda each: np.ones(each.num_tokens), 0.4))
    assert [(each.name, each.severity) for each in report.warnings] == [("mismatch_everywhere", "info")]
    assert "looks like" in report.warnings[0].seen
    assert report.is_clean


@pytest.mark.parametrize("seed", range(3))
def test_single_outliers_are_no_place(seed: int) -> None:
    batch = healthy_batch(seed, Policy(sharpness=2.0))
    assert batch.trainer_log_probs is not None
    off = batch.trainer_log_probs.copy()
    off[np.random.default_rng(seed).integers(0, off.size, 3)] -= 6.0
    assert "mismatch_by_place" not in {each.name for each in lint_batch(replace(batch, trainer_log_probs=off)).warnings}


def test_shards_in_any_order_give_the_places_of_the_batch() -> None:
    whole = batch_with(lambda each: positions(each) < 4)
    parts = [collect_evidence(whole.select(np.arange(start, 128, 4))) for start in (2, 0, 3, 1)]
    merged, one = (each[Places].sums for each in (reduce(LintEvidence.merge, parts), collect_evidence(whole)))
    assert merged.keys.tolist() == one.keys.tolist()
    # A group in several shards counts once in each.
    chosen = [one.COLUMNS.index(name) for name in one.COLUMNS if name != "groups"]
    np.testing.assert_allclose(merged.values[:, chosen], one.values[:, chosen], rtol=1e-9)


def test_prompts_with_all_their_rollouts_are_named() -> None:
    groups = healthy_batch(3, Policy(sharpness=2.0)).group_ids
    assert groups is not None
    chosen = sorted({group for group in groups if group})[2:5]

    def of_prompts(each: RolloutBatch) -> Any:
        assert each.group_ids is not None
        return np.repeat(np.array([group in chosen for group in each.group_ids]), each.response_lengths)

    finding = only(lint_batch(batch_with(of_prompts, 1.5)), "mismatch_by_place")
    assert ": all those of 3 prompts (prompt-2" in finding.title
    assert finding.where
    assert {example.text for example in finding.where} <= set(chosen)
    # Some rollouts of many prompts are not those of a few.
    scattered = lint_batch(batch_with(lambda each: rows(each) % 10 == 1, 1.5))
    assert "prompt" not in only(scattered, "mismatch_by_place").title


def test_turns_come_from_the_mask_if_none_are_logged() -> None:
    batch = healthy_batch(3, Policy(sharpness=2.0))
    tool = (positions(batch) >= 10) & (positions(batch) < 13)

    def later(each: RolloutBatch) -> Any:
        return (positions(each) >= 13) & ~tool

    found = {each.name: each for each in lint_batch(batch_with(later, response_mask=~tool)).warnings}
    finding = found["mismatch_by_place"]
    assert "from turn 1 on" in finding.title
    assert finding.seen.endswith("Turns are those of the response mask, counted from 0.")


def test_a_turn_is_a_run_of_the_models_tokens() -> None:
    mask = np.array([1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 1, 0], bool)
    turns = turns_of_mask(mask, np.array([0, 7, 7, 11, 12]))
    assert turns.tolist() == [0, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 0]


def of_engines(seed: int, size: float, engines: int = 4) -> RolloutBatch:
    """Return rollouts of 16 prompts on some engines; log π is off by noise of this size on one of them."""
    batch = healthy_batch(seed, Policy(sharpness=2.0), groups=16, per_group=8)
    of_rows = np.arange(batch.num_rollouts) // 8 % engines
    batch = replace(batch, engine_ids=[f"dp{engine}" for engine in of_rows.tolist()])
    return off(batch, lambda each: of_rows[rows(each)] == 3, size, seed)


@pytest.mark.parametrize("seed", range(5))
def test_engine_that_differs_from_others_is_named_below_the_range_of_mixtures(seed: int) -> None:
    warning = only(lint_batch(of_engines(seed, 0.1)), "mismatch_by_place")
    assert 0.001 < warning.evidence["k3"] < 0.01
    assert "in the 32 rollouts of the engine dp3, and" in warning.title


@pytest.mark.parametrize("seed", range(20))
def test_engines_that_are_alike_are_no_place(seed: int) -> None:
    assert lint_batch(of_engines(seed, 0.0)).is_clean
    assert lint_batch(of_engines(seed, 0.03)).is_clean


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("short", "advice"), [(True, "Compare padding and positions"), (False, "may cut prompts")])
def test_short_prompts_point_to_padding_and_long_ones_to_cut_prompts(seed: int, short: bool, advice: str) -> None:
    batch = with_prompts(np.random.default_rng(seed).integers(5, 40, 64))
    warning = only(
        lint_batch(off(batch, lambda each: (prompts_of(each) <= 22) == short, 0.8, seed)), "mismatch_by_place"
    )
    assert "rollouts with prompts " in warning.title
    assert advice in warning.remedy


@pytest.mark.parametrize(
    ("chosen", "title"),
    [
        (lambda row: row % 4 > 0, "in every fourth rollout in the logged order, and 0."),
        (lambda row: row % 2 == 1, "in every second rollout in the logged order, and "),
    ],
)
def test_each_nth_rollout_of_a_pack_is_named(chosen: Callable[[Any], Any], title: str) -> None:
    batch = batch_with(lambda each: chosen(rows(each)), 0.6)
    found = only(lint_batch(batch), "mismatch_by_place")
    assert title in found.title
    assert "attention mask of packs" in found.remedy
    halves = [collect_evidence(batch.select(np.arange(*each))) for each in ((0, 48), (48, batch.num_rollouts))]
    merged = run_checks(halves[0].merge(halves[1]))
    assert [each.title for each in merged.warnings if each.name == "mismatch_by_place"] == [found.title]


@pytest.mark.parametrize("seed", range(5))
def test_rollouts_that_are_off_at_random_are_no_pack(seed: int) -> None:
    chosen = np.random.default_rng(seed).random(1000) < 0.5
    batch = batch_with(lambda each: chosen[rows(each)], 0.6, seed)
    assert all("logged order" not in each.title for each in lint_batch(batch).warnings)


def fraction(batch: RolloutBatch) -> Any:
    prompts = np.diff(batch.prompt_offsets)
    whole = np.repeat(prompts + batch.response_lengths, batch.response_lengths)
    return (np.repeat(prompts, batch.response_lengths) + positions(batch)) / whole


def test_few_tokens_with_all_of_the_mismatch_are_told_with_their_parts_of_the_sequence() -> None:
    borders = [0.25, 0.5, 0.75]
    batch = batch_with(lambda each: np.min([np.abs(fraction(each) - at - 0.02) for at in borders], axis=0) < 0.02, 2.5)
    found = only(lint_batch(batch), "mismatch_by_place")
    assert found.title.startswith("few tokens have nearly all of the mismatch: without them k3 is")
    assert "They stand at about 25 %, 50 %, 75 % of the sequence" in found.seen
    scattered = np.random.default_rng(1).random(batch.num_tokens) < 0.07
    found = only(lint_batch(batch_with(lambda _: scattered, 2.5)), "mismatch_by_place")
    assert found.title.startswith("few tokens")
    assert "of the sequence" not in found.seen


def test_tokens_below_a_floor_are_not_told_as_few_with_another_tokens_log_prob() -> None:
    batch = healthy_batch(3, Policy(sharpness=2.0))
    assert batch.rollout_log_probs is not None
    floor = replace(batch, rollout_log_probs=np.maximum(batch.rollout_log_probs, np.float32(-3.0)))
    assert all("few tokens" not in each.title for each in lint_batch(floor).warnings)


@pytest.mark.parametrize("degrees", [3, 5, 30])
def test_a_mismatch_of_all_tokens_with_heavy_tails_is_not_one_of_few(degrees: int) -> None:
    tails = np.random.default_rng(degrees).standard_t(degrees, 10_000)
    batch = batch_with(lambda each: tails[: each.num_tokens], 0.4)
    assert all("few tokens" not in each.title for each in lint_batch(batch).warnings)
