"""Measures of exact divergences against direct formulas, and against the sampled estimator that they replace."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from foreshock.errors import InvalidRolloutsError
from foreshock.measures.exact import measure_exact
from foreshock.rollouts.arrays import offsets_of_lengths
from tests.foreshock.measures.exact_values import exact_of, random_exact, random_log_probs, sampled_from

LENGTHS = [7, 0, 13, 5, 9, 11, 4, 8, 12, 6]
OFFSETS = offsets_of_lengths(np.array(LENGTHS))
TOKENS = sum(LENGTHS)
GROUPS = [f"prompt-{row // 2}" for row in range(len(LENGTHS))]


def test_means_are_token_means_in_float64() -> None:
    exact = random_exact(TOKENS, seed=3)
    found = measure_exact(exact, OFFSETS, group_ids=GROUPS)
    d = exact["target_log_probs"].astype(np.float64) - exact["behaviour_log_probs"]
    expected: dict[str, NDArray[Any]] = {
        "kl": exact["kl"], "reverse_kl": exact["reverse_kl"], "tv": exact["tv"], "top1_flip": exact["top1_flip"],
        "target_entropy": exact["target_entropy"], "behaviour_entropy": exact["behaviour_entropy"],
        "k3_kl": np.expm1(d) - d,
    }  # fmt: skip
    for name, values in expected.items():
        assert getattr(found, name).mean == pytest.approx(values.astype(np.float64).mean(), rel=1e-12), name
    assert found.delta_max == float(exact["tv"].max())
    assert (found.tokens, found.rollouts, found.groups, found.non_finite) == (sum(LENGTHS), 9, 5, 0)


def test_states_before_tool_output_are_excluded() -> None:
    exact = random_exact(TOKENS, seed=3)
    mask = np.random.default_rng(0).integers(0, 2, TOKENS)
    found = measure_exact(exact, OFFSETS, mask, GROUPS)
    assert found.kl.mean == pytest.approx(exact["kl"][mask == 1].astype(np.float64).mean(), rel=1e-12)
    assert found.delta_max == float(exact["tv"][mask == 1].max())
    assert found.tokens == int(mask.sum())


def test_values_that_are_not_finite_are_counted_and_excluded() -> None:
    exact = random_exact(TOKENS, seed=3)
    kl, tv, log_probs = exact["kl"].copy(), exact["tv"].copy(), exact["target_log_probs"].copy()
    kl[2], tv[5], log_probs[8] = np.inf, np.nan, -np.inf
    rest = np.setdiff1d(np.arange(TOKENS), [2, 5, 8])
    found = measure_exact({**exact, "kl": kl, "tv": tv, "target_log_probs": log_probs}, OFFSETS)
    assert found.non_finite == 3
    assert found.tokens == TOKENS - 3
    assert found.kl.mean == pytest.approx(exact["kl"][rest].astype(np.float64).mean(), rel=1e-12)
    assert found.delta_max == float(exact["tv"][rest].max())


def test_nothing_measured_is_nan_and_zero_states() -> None:
    exact = random_exact(7)
    found = measure_exact(exact, np.array([0, 3, 7]), mask=np.zeros(7))
    assert np.isnan([found.kl.mean, found.kl.low, found.delta_max]).all()
    assert (found.tokens, found.rollouts, found.groups) == (0, 0, 0)


def test_sampling_noise_of_tokens_is_in_the_interval_of_k3_only() -> None:
    target, behaviour = (np.repeat(each, 1280, axis=0) for each in random_log_probs(1, seed=8, noise=0.3))
    exact = exact_of(target, behaviour, sampled_from(behaviour, 0))
    found = measure_exact(exact, np.arange(65) * 20, group_ids=[f"prompt-{row // 8}" for row in range(64)])
    assert found.kl.high - found.kl.low < 1e-9 * found.kl.mean
    assert found.k3_kl.high - found.k3_kl.low > 0.01 * found.kl.mean
    assert found.k3_kl.low < found.kl.mean < found.k3_kl.high


def test_sizes_that_do_not_fit_raise() -> None:
    exact = random_exact(7)
    with pytest.raises(InvalidRolloutsError, match="7 tokens"):
        measure_exact(exact, np.array([0, 3, 7]), mask=np.ones(6))
    with pytest.raises(InvalidRolloutsError, match="2 rollouts"):
        measure_exact(exact, np.array([0, 3, 7]), group_ids=["a"])
