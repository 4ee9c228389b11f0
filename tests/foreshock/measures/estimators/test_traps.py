"""Known traps of mismatch measures, each shown by a sample."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from foreshock.measures import ComparisonStatistics


def statistics(d: NDArray[np.float64], tokens: int = 1) -> ComparisonStatistics:
    """Return the statistics of d as rollouts of `tokens` tokens each; μ is low enough that π ≤ 1 for any d."""
    return ComparisonStatistics.of(np.full(d.size, -40.0) + d, np.full(d.size, -40.0), np.arange(0, d.size + 1, tokens))


def test_sequence_means_are_biased_if_length_is_a_stopping_time() -> None:
    """Stop probability 0.05 under μ and 0.06 under π: true KL 9.4e-4, token-mean ρ 1.000, sequence-mean ρ 1.023."""
    generator = np.random.default_rng(0)
    lengths = generator.geometric(0.05, 60_000)
    d = np.full(int(lengths.sum()), math.log(0.94 / 0.95))
    d[np.cumsum(lengths) - 1] = math.log(0.06 / 0.05)
    measures = ComparisonStatistics.of(
        d - 40.0, np.full(d.size, -40.0), np.concatenate([[0], np.cumsum(lengths)])
    ).measures()
    assert measures["mean_ratio"] == pytest.approx(1.000, abs=1e-3)
    assert measures["mean_ratio_seq_mean"] == pytest.approx(1.023, abs=5e-3)
    assert measures["k3_kl"] == pytest.approx(9.4e-4, rel=0.05)
    assert measures["log_ppl_diff"] < 0 < measures["kl"]


def test_token_with_tiny_trainer_probability_shows_in_reverse_measures_only() -> None:
    lost, gained = statistics(np.array([-10.0] + [0.0] * 99)), statistics(np.array([10.0] + [0.0] * 99))
    of_lost, of_gained = lost.measures(), gained.measures()
    assert of_lost["k3_kl"] * 100 == pytest.approx(9, rel=1e-3)
    assert of_gained["k3_kl"] * 100 == pytest.approx(22015.5, rel=1e-4)
    assert of_lost["chi2_token"] < 0.011
    assert of_lost["reverse_chi2_token"] > 200
    assert of_lost["ess_token"] > 0.98
    assert of_lost["tail_asymmetry_1"] > 0 > of_gained["tail_asymmetry_1"]


def test_symmetric_noise_has_no_tail_asymmetry() -> None:
    """d ~ N(−σ²/2, σ²) is a π normalised under μ: raw tails differ by e^τ, the asymmetry is 0."""
    sigma = 0.8
    d = np.random.default_rng(0).normal(-(sigma**2) / 2, sigma, 400_000)
    measures = statistics(d, 100).measures()
    for name in ("ln2", "ln5", "1", "3"):
        assert measures[f"tail_asymmetry_{name}"] == pytest.approx(0.0, abs=2e-3), name
    # Raw tails differ by about e^τ without any asymmetry of the mismatch.
    assert measures["tail_below_1"] == pytest.approx((d < -1).mean())
    assert measures["tail_below_1"] > 1.5 * measures["tail_above_1"]
    assert measures["tail_below_ln5"] > 3 * measures["tail_above_ln5"]
    assert measures["mean_ratio"] == pytest.approx(1.0, abs=0.01)
    assert measures["k3_kl"] == pytest.approx(sigma**2 / 2, rel=0.02)


def test_sequence_ess_is_nan_if_the_sample_is_too_small() -> None:
    generator = np.random.default_rng(0)
    short = statistics(generator.normal(0, 0.01, 6400), 100).measures()
    long = statistics(generator.normal(0, 0.5, 6400), 100).measures()
    assert short["ess_seq"] == pytest.approx(math.exp(-(0.01**2) * 100), rel=0.01)
    assert 2 * long["k3_kl"] * 100 > math.log(64)
    assert math.isnan(long["ess_seq"])
    assert long["ess_token"] == pytest.approx(math.exp(-0.25), rel=0.05)


def test_sequence_ess_is_predicted_but_not_estimable_at_ordinary_mismatch() -> None:
    """KL 6.4e-4 at 8,192 tokens: an effective fraction of 3e-5, which no sample of 64 can show."""
    generator = np.random.default_rng(0)
    sigma = math.sqrt(2 * 6.4e-4)
    measures = statistics(generator.normal(-(sigma**2) / 2, sigma, 64 * 8192), 8192).measures()
    assert measures["k3_kl"] == pytest.approx(6.4e-4, rel=0.01)
    assert measures["ess_seq_predicted"] == pytest.approx(math.exp(-2 * 6.4e-4 * 8192), rel=0.1)
    assert measures["ess_seq_predicted"] == pytest.approx(3e-5, rel=0.15)
    assert math.isnan(measures["ess_seq"])
    mild = statistics(generator.normal(-0.5e-4, 0.01, 2000 * 1000), 1000).measures()
    assert mild["ess_seq"] == pytest.approx(mild["ess_seq_predicted"], rel=0.02)


def test_sequence_weights_are_not_clamped() -> None:
    """verl's chi2_seq is at most exp(40) − 1, for any mismatch."""
    measures = statistics(np.full(60, 0.5), 60).measures()
    assert measures["verl_chi2_seq"] == pytest.approx(math.expm1(60.0))
    assert measures["ppl_ratio"] == pytest.approx(math.exp(-0.5))
    assert measures["training_ppl"] == pytest.approx(math.exp(39.5))
    assert measures["log_ppl_diff_max"] == measures["log_ppl_diff_min"] == -0.5


def test_correlation_with_the_advantage_shows_at_unchanged_kl() -> None:
    """Half of the tokens move up and half down by the same amount; only their advantages differ."""
    size = np.abs(np.random.default_rng(0).normal(0, 0.2, 20_000))
    sign = np.tile([1.0, -1.0], 10_000)
    found = {}
    for name, advantage in (("following", sign), ("against", -sign), ("neither", np.repeat([1.0, -1.0], 10_000))):
        d = sign * size
        found[name] = ComparisonStatistics.of(
            d - 40.0, np.full(d.size, -40.0), [0, d.size], advantage=advantage
        ).measures()
    assert len({measures["k3_kl"] for measures in found.values()}) == 1
    mean = float(size.mean())
    assert found["following"]["advantage_d_cov"] == pytest.approx(mean, rel=0.02)
    assert found["against"]["advantage_d_cov"] == pytest.approx(-mean, rel=0.02)
    assert abs(found["neither"]["advantage_d_cov"]) < 0.01
    for name, expected in (("following", 1), ("against", -1)):
        assert found[name]["advantage_skew_positive"] * expected > 0.05
        assert found[name]["advantage_skew_negative"] * expected > 0.05
    assert abs(found["neither"]["advantage_skew"]) < 0.01


def test_bad_updates_push_down_tokens_with_pi_far_below_mu() -> None:
    """DPPO: A < 0 and μ − π ≥ 0.5; not for A > 0, nor for small probabilities."""
    behaviour = np.log([0.9, 0.9, 0.9, 0.3, 0.3])
    target = np.log([0.3, 0.3, 0.5, 0.001, 0.9])
    measures = ComparisonStatistics.of(target, behaviour, [0, 5], advantage=[-1.0, 1.0, -1.0, -1.0, -1.0]).measures()
    assert measures["bad_update_fraction"] == 1 / 5


def test_pareto_k_shows_an_infinite_variance() -> None:
    """d with a tail exp(−2d) gives ρ a tail ρ^−2: k = ½, where the variance becomes infinite; 1/ρ is bounded."""
    d = np.random.default_rng(0).exponential(0.5, 200_000)
    heavy, turned = statistics(d, 100).measures(), statistics(-d, 100).measures()
    assert heavy["pareto_k"] == pytest.approx(0.5, abs=0.07)
    assert heavy["pareto_k_inverse"] < 0.0
    assert turned["pareto_k_inverse"] == heavy["pareto_k"]
    assert turned["pareto_k"] == heavy["pareto_k_inverse"]


def test_total_variation_lies_below_its_bound() -> None:
    """For d ~ N(−σ²/2, σ²): TV = 2Φ(σ/2) − 1, χ² = exp(σ²) − 1."""
    for sigma in (0.01, 0.3, 1.0):
        measures = statistics(np.random.default_rng(0).normal(-(sigma**2) / 2, sigma, 400_000), 100).measures()
        exact = math.erf(sigma / 2 / math.sqrt(2))
        assert measures["tv_token"] == pytest.approx(exact, rel=0.01)
        assert exact < measures["pinsker_tv_bound"]
        assert measures["pinsker_tv_bound"] == pytest.approx(0.5 * math.sqrt(math.expm1(sigma**2)), rel=0.03)


def test_effective_sizes_are_not_clamped() -> None:
    """With weights clamped to [1/2, 2] they could not fall below 0.64: an alarm at 0.3 could not fire."""
    assert statistics(np.array([8.0] + [0.0] * 999)).measures()["ess_token"] < 0.01


def test_sequence_sums_do_not_overflow() -> None:
    measures = statistics(np.full(4000, 2.0), 2000).measures()
    assert measures["sequence_log_ppl_abs_diff"] == 4000.0
    assert measures["log_ppl_abs_diff"] == 2.0
    assert measures["verl_chi2_seq"] == math.inf
    assert math.isnan(measures["ess_seq"])


def test_copied_log_probs_show_in_zero_fraction() -> None:
    """In bypass training π is a copy of μ: every measure is perfect, and only `zero_fraction` shows why."""
    measures = statistics(np.zeros(100)).measures()
    assert measures["zero_fraction"] == 1.0
    assert measures["k3_kl"] == 0.0


def test_surprisal_detects_a_temperature_that_ratios_hide() -> None:
    """Sampled at temperature 0.8 but logged raw: ρ is 1 everywhere, and tokens are less surprising than H."""
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 2, (4000, 20))
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    entropy = -(np.exp(log_probs) * log_probs).sum(axis=1)
    scores = {}
    for temperature in (1.0, 0.8):
        noise = generator.gumbel(size=logits.shape)
        chosen = np.argmax(logits / temperature + noise, axis=1)
        taken = log_probs[np.arange(4000), chosen].astype(np.float32)
        found = ComparisonStatistics.of(
            taken, taken, np.arange(0, 4001, 20), entropy=entropy.astype(np.float32)
        ).measures()
        assert found["mean_ratio"] == 1.0
        scores[temperature] = found["surprisal_z"]
    assert abs(scores[1.0]) < 3
    assert scores[0.8] < -5


def test_probability_differences_hide_rare_tokens() -> None:
    one = ComparisonStatistics.of([-5.0], [-15.0], [0, 1]).measures()
    assert one["rollout_probs_diff_max"] == pytest.approx(0.0067, abs=1e-4)
    assert one["max_abs_d"] == 10.0


def test_correlation_of_nearly_constant_probabilities_is_accurate() -> None:
    """Their moments cancel in all but the last digits: naive sums of squares give noise here."""
    generator = np.random.default_rng(0)
    target = -2.0 + 1e-6 * generator.normal(size=2000)
    behaviour = target + 1e-6 * generator.normal(size=2000)
    measures = ComparisonStatistics.of(target, behaviour, np.arange(0, 2001, 10)).measures()
    expected = np.corrcoef(np.exp(target), np.exp(behaviour))[0, 1]
    assert measures["rollout_actor_probs_pearson_corr"] == pytest.approx(expected, rel=1e-6)
