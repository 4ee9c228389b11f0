"""Tests of samples of rollouts: the same each time, and of the spread of lengths."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foreshock.rollouts.sampling import select_rollouts


@given(
    lengths=st.lists(st.integers(0, 5_000), min_size=1, max_size=300),
    most=st.one_of(st.none(), st.integers(1, 400)),
    seed=st.one_of(st.none(), st.text(max_size=5)),
)
def test_a_sample_is_the_same_each_time_and_keeps_the_lengths_spread(
    lengths: list[int], most: int | None, seed: str | None
) -> None:
    ids = [f"sample-{number}" for number in range(len(lengths))]
    array = np.array(lengths, dtype=np.int64)
    chosen = select_rollouts(ids, array, most, seed)
    size = len(lengths) if most is None else min(most, len(lengths))
    assert chosen.size == size
    assert np.array_equal(chosen, np.unique(chosen))
    assert np.array_equal(chosen, select_rollouts(ids, array, most, seed))
    # In any part of the sorted lengths there are as many as belong there, give or take one.
    ranks = np.sort(np.searchsorted(np.sort(array), array[chosen], side="right"))
    expected = (np.arange(size) + 1) * len(lengths) / size
    assert (ranks >= expected - len(lengths) / size - 1).all()


def test_over_seeds_every_rollout_has_the_same_chance() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 30)
    ids = [f"sample-{number}" for number in range(30)]
    seeds = 1_000
    counts = np.zeros(30)
    for seed in range(seeds):
        counts[select_rollouts(ids, lengths, 7, f"run/{seed}")] += 1
    expected = seeds * 7 / 30
    # Six standard deviations of a binomial count.
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected * (1 - 7 / 30))
