"""The surprisal test: standard normal for the sampling distribution, and its power against other logged distributions.

The policy is a softmax over 48 tokens whose entropies spread like a language model's, from almost 0 to almost uniform.
"""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

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
