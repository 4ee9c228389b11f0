"""The compiled pass equals the numpy reference, as one property over random batches."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from foreshock.measures.inputs import TokenInputs
from foreshock.measures.passes.compiled import prepare, sum_rollouts_compiled
from foreshock.measures.passes.numpy_pass import sum_rollouts_numpy
from foreshock.measures.statistics.conditions import BUCKET_SUMS, CONDITIONS
from foreshock.measures.statistics.log_weights import LogWeights
from foreshock.measures.statistics.rollout_sums import TOKEN_SUMS, RolloutSums
from foreshock.measures.statistics.tails import TAIL_LEVELS
from foreshock.measures.statistics.token_ids import TOKEN_ID_SUMS
from foreshock.rollouts.arrays import offsets_of_lengths

Float64 = NDArray[np.float64]

# Tolerance of sums, relative to the sum of absolute values.
TOLERANCE = 1e-12
# Just below the smallest probability that is not taken as 0.
VANISHING = 1e-290


@pytest.fixture(scope="module", autouse=True)
def machine_code() -> None:
    prepare()


def magnitudes(inputs: TokenInputs) -> Float64:
    """Return the sums of the absolute values of the terms, [N, len(TOKEN_SUMS)], from the definitions."""
    generated = np.ones(inputs.target.size, bool) if inputs.generated is None else inputs.generated
    rows = np.repeat(np.arange(inputs.offsets.size - 1), np.diff(inputs.offsets))
    kept = generated & np.isfinite(inputs.target) & np.isfinite(inputs.behaviour)
    rows, count = rows[kept], inputs.offsets.size - 1
    target, behaviour = inputs.target[kept].astype(np.float64), inputs.behaviour[kept].astype(np.float64)
    d = target - behaviour
    # Zero times an overflow is masked below.
    with np.errstate(over="ignore", invalid="ignore"):
        above, chi2 = np.expm1(d), np.square(np.expm1(d))
        skew = _of_tokens(inputs.advantage, kept, rows) * np.abs(above)
    entropy = _of_tokens(inputs.entropy, kept, rows)
    advantage = _of_tokens(inputs.advantage, kept, rows)
    # Squares about a mean are a difference of squares.
    probabilities = np.exp(target), np.exp(behaviour)
    differences = np.maximum(*probabilities) * -np.expm1(-np.abs(d))
    terms = {
        "ratio_minus_one": np.abs(above),
        "chi2_token": chi2,
        "log_target": np.abs(target),
        "log_behaviour": np.abs(behaviour),
        "entropy": entropy,
        "surprisal": np.where(entropy > 0, np.abs(behaviour) + entropy, 0.0),
        "advantage": advantage,
        "advantage_d": advantage * np.abs(d),
        "positive_advantage_skew": np.where(advantage > 0, skew, 0.0),
        "negative_advantage_skew": np.where(advantage > 0, skew, 0.0),
        "d_with_advantage": np.abs(d),
        "within_target": np.square(probabilities[0]),
        "within_behaviour": np.square(probabilities[1]),
        "within_difference": np.square(differences),
    }
    reference = sum_rollouts_numpy(inputs).sums
    sums = np.abs(reference)
    for name, values in terms.items():
        sums[:, TOKEN_SUMS.index(name)] = np.bincount(rows, values, count)
    sums[:, TOKEN_SUMS.index("d")] = sums[:, TOKEN_SUMS.index("abs_d")]
    sums[:, TOKEN_SUMS.index("within_product")] = np.prod([_norms(each, rows, count) for each in probabilities], axis=0)
    return sums


def _norms(values: Float64, rows: NDArray[np.int64], count: int) -> Float64:
    """Return the root of the sum of squares of each rollout; squares of small values would underflow."""
    largest = np.zeros(count)
    np.maximum.at(largest, rows, values)
    scale = np.where(largest > 0, largest, 1.0)
    norms: Float64 = scale * np.sqrt(np.bincount(rows, np.square(values / scale[rows]), count))
    return norms


def _of_tokens(values: NDArray[np.floating] | None, kept: NDArray[np.bool_], rows: NDArray[np.int64]) -> Float64:
    """Return |value| of each kept token, 0 if there is none."""
    if values is None:
        return np.zeros(rows.size)
    of_tokens = values[kept] if values.size == kept.size else values[rows]
    return np.where(np.isfinite(of_tokens), np.abs(of_tokens.astype(np.float64)), 0.0)


def assert_close(found: Any, expected: Any, magnitude: Any, what: str) -> None:
    found, expected, magnitude = (np.asarray(values, dtype=np.float64) for values in (found, expected, magnitude))
    finite = np.isfinite(expected) & np.isfinite(found)
    np.testing.assert_array_equal(found[~finite], expected[~finite], err_msg=what)
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(found - expected) > TOLERANCE * magnitude + VANISHING
    assert not (off & finite).any(), f"{what}: {found[off & finite]} for {expected[off & finite]}"


def assert_log_weights_are_equal(found: LogWeights, expected: LogWeights, magnitude: float, what: str) -> None:
    assert found.count == expected.count, what
    if expected.count:
        for power, name in ((1, "scaled_sum"), (2, "scaled_square_sum")):
            logs = [power * weights.largest + math.log(getattr(weights, name)) for weights in (found, expected)]
            assert logs[0] == pytest.approx(logs[1], abs=TOLERANCE * (1.0 + magnitude)), what


def assert_equal(found: RolloutSums, expected: RolloutSums, inputs: TokenInputs) -> None:
    """Assert that integers, extremes and largest values are identical, and sums within the tolerance."""
    for field in dataclasses.fields(RolloutSums):
        value = getattr(expected, field.name)
        if isinstance(value, int) or (isinstance(value, np.ndarray) and value.dtype == np.int64):
            np.testing.assert_array_equal(getattr(found, field.name), value, err_msg=field.name)
            assert np.asarray(getattr(found, field.name)).dtype == np.asarray(value).dtype
    for name in ("min_d", "max_d", "largest_d", "largest_minus_d"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    of_sums = magnitudes(inputs)
    for index, name in enumerate(TOKEN_SUMS):
        assert_close(found.sums[:, index], expected.sums[:, index], of_sums[:, index], name)
    assert_close(
        found.max_probability_difference, expected.max_probability_difference, 1.0, "max_probability_difference"
    )
    sizes = inputs if inputs.advantage is None else dataclasses.replace(inputs, advantage=np.abs(inputs.advantage))
    of_absolute = sum_rollouts_numpy(sizes)
    assert_close(found.region_sums, expected.region_sums, np.abs(of_absolute.region_sums), "region_sums")
    abs_d = BUCKET_SUMS.index("abs_d")
    for name in CONDITIONS:
        mine, theirs = found.conditions[name], expected.conditions[name]
        np.testing.assert_array_equal(mine.tokens, theirs.tokens, err_msg=name)
        np.testing.assert_array_equal(mine.max_abs_d, theirs.max_abs_d, err_msg=name)
        scale = np.abs(theirs.sums)
        scale[:, BUCKET_SUMS.index("d")] = scale[:, abs_d]
        assert_close(mine.sums, theirs.sums, scale, name)
    np.testing.assert_array_equal(found.token_ids.ids, expected.token_ids.ids)
    np.testing.assert_array_equal(found.token_ids.tokens, expected.token_ids.tokens)
    np.testing.assert_array_equal(found.token_ids.covered, expected.token_ids.covered)
    assert found.token_ids.bound == expected.token_ids.bound
    scale = np.abs(expected.token_ids.sums)
    scale[:, TOKEN_ID_SUMS.index("d")] = scale[:, TOKEN_ID_SUMS.index("abs_d")]
    assert_close(found.token_ids.sums, expected.token_ids.sums, scale, "token_ids")
    magnitude = float(expected.column("abs_d").sum())
    assert_log_weights_are_equal(found.token_weights, expected.token_weights, 0.0, "token_weights")
    assert_log_weights_are_equal(found.turn_weights, expected.turn_weights, magnitude, "turn_weights")


def batch(
    seed: int,
    lengths: list[int],
    size: float,
    float_type: type[np.floating],
    odd: float,
    columns: frozenset[str],
    advantage: str,
) -> TokenInputs:
    """Return rollouts of these lengths with |d| around `size`.

    A fraction `odd` of the log-probs is NaN, infinite, a mask's substitute for −∞, equal, or exactly at a cut.
    """
    random = np.random.default_rng(seed)
    offsets = offsets_of_lengths(lengths)
    tokens = int(offsets[-1])
    behaviour = -random.exponential(random.choice([0.1, 2.0, 20.0]), tokens)
    target = behaviour + size * random.normal(0, 1, tokens) * random.choice([0.01, 1.0, 3.0], tokens)
    # Log-probs are at most a little above 0.
    excess = np.maximum(target - random.choice([0.0, 0.5]), 0.0)
    target, behaviour = target - excess, behaviour - excess
    cuts = np.array([*TAIL_LEVELS, *(-level for level in TAIL_LEVELS), 0.0])
    edges = np.log([edge for edge in CONDITIONS["probability"].edges if edge > 0])
    for place in np.flatnonzero(random.random(tokens) < odd):
        match random.integers(5):
            case 0:
                target[place] = random.choice(np.array([np.nan, np.inf, -np.inf, -1e9, np.finfo(np.float32).min]))
            case 1:
                behaviour[place] = random.choice([np.nan, np.inf, -np.inf])
            case 2:
                target[place] = behaviour[place]
            case 3:
                behaviour[place] = random.choice(edges)
            case _:
                # d is the cut to the last digit: one side is 0.
                cut = random.choice(cuts)
                target[place], behaviour[place] = min(cut, 0.0), min(-cut, 0.0)
    optional: dict[str, Any] = {}
    if "generated" in columns:
        optional["generated"] = random.random(tokens) < random.choice([0.05, 0.9])
    if "entropy" in columns:
        entropy = random.exponential(1.0, tokens) * 10.0 ** random.integers(-8, 2, tokens)
        special = [0.0, np.nan, np.inf, -1e-9, *CONDITIONS["entropy"].edges[1:-1]]
        optional["entropy"] = np.where(random.random(tokens) < odd, random.choice(special, tokens), entropy).astype(
            float_type
        )
    if "turn" in columns:
        runs = random.choice([0.01, 0.9])
        optional["turn"] = np.cumsum(random.random(tokens) < runs).astype((np.int16, np.int32)[random.integers(2)])
    if "lag" in columns:
        optional["lag"] = (random.integers(-2, 100, tokens) * (random.random() < 0.5)).astype(np.int64)
    if "token_ids" in columns:
        optional["token_ids"] = random.integers(0, random.choice([3, 500, 2**31 - 1]), tokens).astype(np.int32)
    if advantage != "none":
        count = tokens if advantage == "tokens" else len(lengths)
        values = random.normal(0, 1, count) * random.integers(0, 2, count)
        values[random.random(count) < odd] = np.nan
        optional["advantage"] = values.astype(float_type)
    return TokenInputs(target.astype(float_type), behaviour.astype(float_type), offsets, **optional)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.one_of(st.integers(0, 40), st.sampled_from([0, 1, 511, 512, 513, 1500])), max_size=12),
    size=st.sampled_from([1e-9, 1e-6, 1e-4, 1e-2, 0.3, 3.0, 30.0, 700.0]),
    float_type=st.sampled_from([np.float32, np.float64]),
    odd=st.sampled_from([0.0, 0.02, 0.5]),
    columns=st.frozensets(st.sampled_from(["generated", "entropy", "turn", "lag", "token_ids"])),
    advantage=st.sampled_from(["none", "tokens", "rollouts"]),
)
def test_both_passes_give_the_same_sums(
    seed: int,
    lengths: list[int],
    size: float,
    float_type: type[np.floating],
    odd: float,
    columns: frozenset[str],
    advantage: str,
) -> None:
    inputs = batch(seed, lengths, size, float_type, odd, columns, advantage)
    assert_equal(sum_rollouts_compiled(inputs), sum_rollouts_numpy(inputs), inputs)
