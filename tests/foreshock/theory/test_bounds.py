"""Bounds on the bias of a gradient: formulas, conditions, and vacuous cases."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.errors import InvalidArgumentError
from foreshock.measures.rollout_summaries import RolloutSummaries
from foreshock.theory import bias_bound, evaluate_theory, horizon_bound, pinsker_bound, sequence_chi2
from tests.foreshock.batches import compared, random_batch
from tests.foreshock.corrections.direct import batch_of, mean, sequences_of


@pytest.mark.parametrize("largest", [0.01, 0.5, 3.0])
def test_bias_bound_equals_a_loop_over_tokens(largest: float) -> None:
    batch = random_batch(seed=3, rollouts=30, largest=largest)
    found = bias_bound(compared(batch).summaries)
    sequences = sequences_of(batch)
    terms = [abs(math.exp(math.fsum(each.d)) - 1) * len(each.d) * abs(each.reward) for each in sequences]
    assert found.per_unit == pytest.approx(mean(terms), rel=1e-9)
    assert found.low < found.per_unit < found.high
    lengths = [float(len(each.d)) for each in sequences]
    assert found.trivial == pytest.approx(2 * mean(lengths) * max(abs(each.reward) for each in sequences))
    assert (found.sequences, found.longest) == (len(sequences), max(lengths))


def test_rollouts_with_a_missing_log_prob_are_in_no_bound_on_the_bias() -> None:
    whole = batch_of([[0.5, 0.4], [-0.3, 0.1, 0.2], [0.05]], reward=[1.0, 1.0, 1.0])
    assert whole.trainer_log_probs is not None
    log_probs = whole.trainer_log_probs.copy()
    log_probs[1] = math.nan
    found = bias_bound(compared(dataclasses.replace(whole, trainer_log_probs=log_probs)).summaries)
    expected = bias_bound(compared(whole.select([1, 2])).summaries)
    assert found.per_unit == pytest.approx(expected.per_unit)
    assert found.sequences == 2
    assert found.notes[0].endswith("their ρ_seq is unknown: 1")


def test_bias_bound_is_nan_without_rewards() -> None:
    found = bias_bound(compared(batch_of([[0.1], [0.2]])).summaries)
    assert math.isnan(found.per_unit)
    assert found.notes
    assert math.isnan(bias_bound(RolloutSummaries.concat([])).per_unit)


def test_horizon_bound_needs_delta_max_and_reports_vacuous() -> None:
    without = horizon_bound(1000.0)
    assert math.isnan(without.value)
    assert without.not_estimable is not None
    assert "supremum" in without.not_estimable
    small, large = horizon_bound(1000.0, 1e-4), horizon_bound(1000.0, 1e-3)
    assert (small.trivial, small.vacuous, large.vacuous) == (2000.0, False, True)
    assert (small.value, large.value) == pytest.approx((200.0, 2000.0))


@given(st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=6), st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=6))
def test_pinsker_bound_is_at_least_total_variation(first: list[float], second: list[float]) -> None:
    size = min(len(first), len(second))
    pi, mu = (np.array(values[:size]) / sum(values[:size]) for values in (first, second))
    variation, chi2 = 0.5 * np.abs(pi - mu).sum(), (np.square(pi - mu) / mu).sum()
    assert variation <= pinsker_bound(float(chi2)) + 1e-12


def test_total_variation_above_bound_notes_missing_coverage() -> None:
    # Top-p 0.9 logged with what it sampled from: every ρ is 0.9, D_TV is 0.1, and ½√χ² is 0.05.
    truncated = compared(batch_of([[math.log(0.9)] * 5] * 4))
    found = evaluate_theory(truncated.statistics, truncated.summaries)
    assert (found.pinsker.tv_token, found.pinsker.bound) == pytest.approx((0.1, 0.05), rel=1e-4)
    assert "mean ratio is 0.9:" in found.pinsker.notes[0]
    covered = compared(batch_of([[math.log(0.5), math.log(1.5)]] * 4))
    assert evaluate_theory(covered.statistics, covered.summaries).pinsker.notes == ()


def test_vacuous_bias_bound_is_noted() -> None:
    far = bias_bound(compared(batch_of([[3.0] * 4, [-1.0]], reward=[1.0, 0.0])).summaries)
    assert far.per_unit > far.trivial
    assert far.notes[0] == "no better than the trivial bound"
    beyond_float64 = bias_bound(compared(batch_of([[20.0] * 40], reward=[1.0])).summaries)
    assert beyond_float64.per_unit == math.inf
    assert beyond_float64.notes[0] == "no better than the trivial bound"
    unrewarded = bias_bound(compared(batch_of([[20.0] * 40], reward=[0.0])).summaries)
    assert (unrewarded.per_unit, unrewarded.trivial) == (0.0, 0.0)
    assert "no better than the trivial bound" not in unrewarded.notes


def test_sequence_chi2_extrapolates_independent_tokens() -> None:
    found = sequence_chi2(0.01, 100.0)
    assert found.value == pytest.approx(1.01**100)
    assert found.log10 == pytest.approx(math.log10(found.value))
    far = sequence_chi2(0.5, 10_000.0)
    assert far.value == math.inf
    assert far.log10 == pytest.approx(10_000 * math.log10(1.5))
    assert sequence_chi2(0.0, 5.0).value == 1.0


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: horizon_bound(10.0, 1.5), "delta_max"), (lambda: horizon_bound(10.0, math.nan), "delta_max"),
        (lambda: horizon_bound(-1.0), "length"), (lambda: pinsker_bound(-0.1), "chi2"),
        (lambda: sequence_chi2(-0.1, 5.0), "chi2_token"), (lambda: sequence_chi2(0.1, math.nan), "length"),
    ],
)  # fmt: skip
def test_invalid_argument_is_refused_by_name(call: object, argument: str) -> None:
    assert callable(call)
    with pytest.raises(InvalidArgumentError) as refused:
        call()
    assert refused.value.argument == argument


def test_theory_of_a_step_is_computed_from_statistics() -> None:
    comparison = compared(random_batch(seed=0, largest=0.4))
    assert comparison.statistics.count("whole_rollouts") < comparison.summaries.num_rollouts
    found = evaluate_theory(comparison.statistics, comparison.summaries)
    measures = comparison.statistics.measures()
    assert found.pinsker.tv_token == pytest.approx(measures["tv_token"])
    assert found.pinsker.tv_token <= found.pinsker.bound == pytest.approx(0.5 * math.sqrt(measures["chi2_token"]))
    assert found.sequence_chi2 is not None
    mean_length = measures["tokens"] / int((comparison.summaries.column("n_tokens") > 0).sum())
    assert found.sequence_chi2.log10 == pytest.approx(mean_length * math.log10(1 + measures["chi2_token"]))
    assert (found.gradient, found.step_noise, found.step_noise_with_bias) == (None, None, None)
    nothing = compared(batch_of([[]]))
    empty = evaluate_theory(nothing.statistics, nothing.summaries)
    assert empty.sequence_chi2 is None
    assert math.isnan(empty.pinsker.bound)
