"""The surprisal test: standard normal for the sampling distribution, and its power against other logged distributions.

The policy is a softmax over 48 tokens whose entropies spread like a language model's, from almost 0 to almost uniform.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.statistics.clusters import CLUSTER_COLUMNS, ClusterSums

Float64 = NDArray[np.float64]

VOCABULARY = 48


def log_probs(seed: int, states: int) -> Float64:
    """Return log-probs, [states, VOCABULARY]: logits of normal noise whose size differs by state."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(states, VOCABULARY)) * random.uniform(1.5, 5.0, (states, 1))
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


def entropies(raw_log_probs: Float64) -> Float64:
    return np.asarray(-(np.exp(raw_log_probs) * raw_log_probs).sum(axis=1))


def tempered(raw_log_probs: Float64, temperature: float) -> Float64:
    scaled = raw_log_probs / temperature
    return np.asarray(scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True)))


def truncated(raw_log_probs: Float64, top_p: float) -> Float64:
    """Return the distribution over the fewest likeliest tokens with a total of `top_p`, −inf elsewhere."""
    order = np.argsort(-raw_log_probs, axis=1)
    ranked = np.take_along_axis(np.exp(raw_log_probs), order, axis=1)
    kept_ranked = ranked.cumsum(axis=1) - ranked < top_p
    kept = np.zeros(raw_log_probs.shape, dtype=np.bool_)
    np.put_along_axis(kept, order, kept_ranked, axis=1)
    remaining = np.where(kept, np.exp(raw_log_probs), 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(remaining / remaining.sum(axis=1, keepdims=True)))


def tokens_until_five(raw_log_probs: Float64, sampled_from: Float64) -> float:
    """Return the mean number of independent tokens until the surprisal of raw log-probs is five standard deviations
    off.
    """
    probabilities = np.exp(sampled_from)
    surprisal = -raw_log_probs - entropies(raw_log_probs)[:, None]
    mean = (probabilities * surprisal).sum(axis=1).mean()
    square = (probabilities * np.square(surprisal)).sum(axis=1).mean()
    return float(25.0 * square / mean**2)


@pytest.mark.parametrize("groups", [5, 12, 40])
def test_surprisal_is_standard_normal_for_the_sampling_distribution(groups: int) -> None:
    raw_log_probs = log_probs(0, 400)
    random = np.random.default_rng(groups)
    steps, batches, rollouts = 20, 800, 4
    column = CLUSTER_COLUMNS.index("surprisal")
    names = [f"g{row // rollouts}" for row in range(groups * rollouts)]
    # Every group has states of its own, so its rollouts have similar entropies.
    states = np.repeat(random.integers(0, 400, (batches, groups, 1, steps)), rollouts, axis=2)
    cumulative = np.exp(raw_log_probs).cumsum(axis=1)
    tokens = (random.random((*states.shape, 1)) > cumulative[states]).sum(axis=-1).clip(max=VOCABULARY - 1)
    surprisals = (-raw_log_probs[states, tokens] - entropies(raw_log_probs)[states]).sum(axis=-1).reshape(batches, -1)
    scores = []
    for of_rollouts in surprisals:
        sums = np.zeros((of_rollouts.size, len(CLUSTER_COLUMNS)))
        sums[:, column] = of_rollouts
        clusters = ClusterSums.of(np.full(of_rollouts.size, steps), sums, names)
        scores.append(clusters.standardised("surprisal", float(of_rollouts.sum())))
    found = np.array(scores)
    assert abs(found.mean()) < 0.15
    assert found.std() == pytest.approx(1.0, abs=0.08)
    # With few groups it is conservative: large scores are rarer than for a normal.
    beyond = np.mean(np.abs(found) > 1.96)
    assert beyond < 0.075
    assert beyond > 0.025 or groups < 12
    assert np.abs(found).max() <= math.sqrt(groups)


def test_surprisal_of_few_groups_is_bounded() -> None:
    found = ComparisonStatistics.of(
        np.full(40, -9.0), np.full(40, -9.0), np.arange(0, 41, 10), entropy=np.full(40, 0.1)
    ).measures()
    assert found["surprisal_z"] == pytest.approx(math.sqrt(4))


def test_tokens_needed_to_detect_truncation_and_temperature() -> None:
    raw_log_probs = log_probs(1, 4000)
    top_p = tokens_until_five(raw_log_probs, truncated(raw_log_probs, 0.9))
    temperature = tokens_until_five(raw_log_probs, tempered(raw_log_probs, 0.8))
    mild = tokens_until_five(raw_log_probs, tempered(raw_log_probs, 0.95))
    # On a real model: 213, 111 and 2,579.
    assert 213 / 3 < top_p < 213 * 3
    assert 111 / 3 < temperature < 111 * 3
    assert 2579 / 3 < mild < 2579 * 3
    # The shift is first order in 1 − temperature: a quarter of it needs about sixteen times the tokens.
    assert mild / temperature == pytest.approx(20.0, rel=0.4)


@pytest.mark.parametrize(("name", "tokens"), [("top-p 0.9", 4000), ("temperature 0.8", 4000)])
def test_only_surprisal_detects_raw_log_probs(name: str, tokens: int) -> None:
    raw_log_probs = log_probs(2, tokens)
    sampled_from = truncated(raw_log_probs, 0.9) if name == "top-p 0.9" else tempered(raw_log_probs, 0.8)
    random = np.random.default_rng(3)
    chosen = np.argmax(sampled_from + random.gumbel(size=raw_log_probs.shape), axis=1)
    every = np.arange(tokens)
    offsets = np.arange(0, tokens + 1, 10)
    raw, processed = raw_log_probs[every, chosen], sampled_from[every, chosen]
    of_raw = ComparisonStatistics.of(raw, raw, offsets, entropy=entropies(raw_log_probs)).measures()
    assert of_raw["mean_ratio"] == 1.0
    assert of_raw["surprisal_z"] < -5.0
    # π is untruncated: ratios to the sampling μ show the truncation, ratios to the raw μ do not.
    of_processed = ComparisonStatistics.of(raw, processed, offsets).measures()
    assert of_processed["rms_d"] > 0.05
    if name == "top-p 0.9":
        assert of_processed["mean_ratio"] == pytest.approx(0.9, abs=0.05)
        assert of_processed["kl"] == pytest.approx(-math.log(of_processed["mean_ratio"]), abs=0.02)
