"""Common properties of corrections: catalogue, thresholds, affected sequences, any split of the batch."""

import math
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.corrections import CORRECTIONS, Bounds, Evaluator, Threshold, correction_named
from foreshock.errors import InvalidArgumentError
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.rollout_summaries import RolloutSummaries
from tests.foreshock.batches import compared, random_batch
from tests.foreshock.corrections.direct import batch_of, evaluate, flat


@settings(max_examples=8)
@given(st.integers(0, 2**32), st.permutations(range(9)), st.integers(1, 5))
def test_any_split_in_any_order_gives_same_evaluation(seed: int, order: list[int], parts: int) -> None:
    batch = random_batch(seed=seed, rollouts=9, longest=15, largest=4.0)
    whole = compared(batch)
    pieces = [compared(batch.select(np.array(rows))) for rows in np.array_split(order, parts)]
    statistics = reduce(ComparisonStatistics.merge, [piece.statistics for piece in pieces])
    summaries = RolloutSummaries.concat([piece.summaries for piece in pieces])
    pairs = zip(
        Evaluator(whole.statistics, whole.summaries).evaluate_usual(),
        Evaluator(statistics, summaries).evaluate_usual(),
        strict=True,
    )
    for expected, found in pairs:
        assert (found.used, found.notes) == (expected.used, expected.notes)
        counted = ("kept_tokens", "kept_sequences", "touched_tokens", "touched_sequences", "untouched_sequences")
        values, others = flat(found), flat(expected)
        assert [values[name] for name in counted] == pytest.approx(
            [others[name] for name in counted], rel=0, nan_ok=True
        )
        assert values == pytest.approx(others, rel=1e-12, abs=1e-12, nan_ok=True)


def test_catalogue_has_every_correction_with_valid_thresholds() -> None:
    assert {"token_tis", "token_mis", "sequence_tis", "sequence_mis", "geo_mis", "icepop"} < set(CORRECTIONS)
    assert {"k3_rs_mean", "k3_rs_sum", "k3_rs_max", "veto"} < set(CORRECTIONS)
    for name, correction in CORRECTIONS.items():
        assert correction.name == name
        assert correction.source
        for threshold in correction.usual:
            assert correction.check(threshold) == threshold
            if correction.bounds is not Bounds.NONE:
                assert correction.threshold(str(threshold)) == threshold


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("token_tis", "0.5"), ("token_tis", "0.5_2"), ("token_tis", "-2"), ("token_tis", "nan"), ("token_tis", "inf"),
        ("token_tis", ""), ("token_tis", "two"), ("icepop", "0.5_1_2"), ("icepop", "5_0.5"), ("geo_mis", "1.1_1.2"),
        ("k3_rs_mean", "0"), ("k3_rs_mean", "0.1_0.2"), ("veto", "2"), ("veto", "1e-4_1"), ("none", "2"),
    ],
)  # fmt: skip
def test_invalid_threshold_is_refused(name: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        correction_named(name).threshold(text)
    assert refused.value.argument == "threshold"


@settings(max_examples=60)
@given(st.sampled_from(sorted(CORRECTIONS)), st.text(max_size=12) | st.from_regex(r"[0-9.e_+-]{0,10}", fullmatch=True))
def test_any_text_is_a_threshold_or_refused(name: str, text: str) -> None:
    correction = correction_named(name)
    try:
        threshold = correction.threshold(text)
    except InvalidArgumentError:
        return
    assert correction.check(threshold) == threshold
    assert threshold.log_lower <= threshold.log_upper or correction.bounds is Bounds.DIVERGENCE


def test_single_bound_of_a_range_is_symmetric_in_logarithm() -> None:
    threshold = correction_named("icepop").threshold("3")
    assert threshold == Threshold(1 / 3, 3.0)
    assert threshold.log_lower == -threshold.log_upper


def test_unknown_correction_error_lists_known_names() -> None:
    with pytest.raises(InvalidArgumentError, match="geo_mis"):
        evaluate("token_tiss", random_batch())


def test_statistics_and_summaries_of_different_rollouts_are_refused() -> None:
    one, other = compared(random_batch(seed=1)), compared(random_batch(seed=2))
    with pytest.raises(InvalidArgumentError, match="must be of the same rollouts"):
        Evaluator(one.statistics, other.summaries).evaluate("token_tis")


def test_batch_without_tokens_is_not_estimable() -> None:
    nothing = compared(batch_of([[], []]))
    for found in Evaluator(nothing.statistics, nothing.summaries).evaluate_usual():
        assert found.not_estimable is not None
        assert math.isnan(found.distortion)


def test_affected_sequences_are_compared_with_the_others() -> None:
    batch = batch_of(
        [[0.0, 3.0, 0.0], [0.1], [0.0], [3.0, 3.0], [2.9]],
        reward=np.array([1.0, 0.0, math.nan, 1.0, 0.5]),
        group_ids=["a", "a", "b", "c", "c"],
        turn=np.array([0, 1, 1, 0, 0, 0, 1, 0], np.int16),
    )
    found = evaluate("token_mis", batch).affected
    assert (found.touched.sequences, found.touched.length_mean) == (3, 2.0)
    assert found.touched.reward_mean == pytest.approx(2.5 / 3)
    assert (found.untouched.sequences, found.untouched.reward_mean, found.untouched.length_mean) == (2, 0.0, 1.0)
    assert found.touched.turns_mean == pytest.approx(5 / 3)
    assert found.untouched.turns_mean == 1.0
    assert math.isnan(found.touched.advantage_mean)
    assert math.isnan(found.touched.lag_mean)
    # A group of one sequence has no baseline, and is not counted.
    assert (found.groups, found.groups_touched, found.groups_emptied) == (2, 1.0, 0.5)


def test_extreme_ratios_neither_fail_nor_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreshock.rollouts.schema.LEAST_LOG_PROB", -math.inf)
    comparison = compared(batch_of([[390.0, -390.0], [0.1, 0.0]], behaviour=-395.0))
    for found in Evaluator(comparison.statistics, comparison.summaries).evaluate_usual():
        if found.not_estimable is None:
            assert 0.0 <= found.kept_tokens <= 1.0
            assert not found.weights.variance < 0.0
    tis = evaluate("token_mis", comparison)
    assert tis.kept_tokens == 0.75
    assert math.isfinite(tis.weights.variance)
