"""The registry names every measure once, and each is computed."""

from __future__ import annotations

import re

import pytest

from foreshock.measures import MEASURES, measure_named, measure_step
from foreshock.measures.registry import COMPARISON_MEASURES, STEP_MEASURES
from tests.foreshock.batches import random_batch

FACTS = {
    "kl",
    "k2_kl",
    "k3_kl",
    "chi2_token",
    "reverse_chi2_token",
    "tv_token",
    "verl_chi2_token",
    "verl_chi2_seq",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "sequence_log_ppl_abs_diff",
    "ess_token",
    "ess_turn",
    "ess_seq",
    "mean_ratio",
    "surprisal_z",
    "token_mult_prob_error",
    "rollout_probs_diff_mean",
    "rollout_probs_diff_max",
    "rollout_probs_diff_std",
    "rollout_actor_probs_pearson_corr",
    "tail(2)",
    "tail_asymmetry(1)",
    "geo_ratio",
    "p50_abs_d",
    "p90_abs_d",
    "ess_seq_predicted",
    "pareto_k",
    "pareto_k_inverse",
    "pinsker_tv_bound",
    *(f"tail_{side}({level})" for side in ("below", "above", "asymmetry") for level in ("ln2", "ln5", "1", "3", "10")),
    *("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "ppl_ratio"),
    *("log_ppl_diff_max", "log_ppl_diff_min"),
    *("advantage_d_cov", "advantage_skew", "advantage_skew_positive", "advantage_skew_negative"),
    "bad_update_fraction",
    *("low_probability_abs_d", "low_probability_tokens"),
    *(f"{name}_{end}" for name in ("k3_kl", "chi2_token", "tv_token") for end in ("bootstrap_low", "bootstrap_high")),
}


def test_registry_has_every_expected_name() -> None:
    assert {measure.name for measure in MEASURES} >= FACTS


def test_names_and_columns_are_unique_and_columns_are_identifiers() -> None:
    assert len({measure.name for measure in MEASURES}) == len(MEASURES)
    assert len({measure.column for measure in MEASURES}) == len(MEASURES)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", measure.column) for measure in MEASURES)
    # PostgreSQL truncates longer names silently.
    assert max(len(measure.column) for measure in MEASURES) < 63


def test_computed_measures_equal_registered_measures() -> None:
    measurement = measure_step(random_batch(0))
    comparison = measurement.comparisons["trainer/rollout"]
    computed = comparison.measures()
    assert set(comparison.statistics.measures()) == set(computed)
    assert set(computed) == {measure.column for measure in COMPARISON_MEASURES}
    assert set(measurement.step.measures()) == {measure.column for measure in STEP_MEASURES}
    for measure in MEASURES:
        values = computed if measure.kind != "step" else measurement.step.measures()
        expected = int if measure.column_type == "integer" else float
        assert isinstance(values[measure.column], expected), measure.name


def test_every_measure_has_formula_unit_and_source() -> None:
    for measure in MEASURES:
        assert measure.formula, measure.name
        assert measure.unit, measure.name
        assert measure.aggregation, measure.name
        assert measure.source, measure.name
        if measure.kind == "comparison" and measure.column_type == "float":
            assert measure.direction, measure.name


def test_sequence_means_carry_their_suffix() -> None:
    for measure in COMPARISON_MEASURES:
        if measure.name.endswith("_seq_mean"):
            assert measure.kind == "sequence"
            assert measure.aggregation == "mean over sequences"


def test_measure_is_found_by_name_and_by_column() -> None:
    assert measure_named("tail(2)") is measure_named("tail_2")
    with pytest.raises(KeyError):
        measure_named("tail(3)")
