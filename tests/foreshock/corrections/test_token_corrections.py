"""Token corrections against the direct evaluation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.corrections import Threshold, correction_named
from foreshock.measures.statistics.histograms import WEIGHT_GRID
from foreshock.measures.statistics.tails import TAIL_LEVELS
from tests.foreshock.batches import random_batch
from tests.foreshock.corrections.direct import assert_same, batch_of, direct_tokens, evaluate, mean

EXACT = [
    ("none", Threshold()), ("token_is", Threshold()), ("token_tis", Threshold(upper=1.0)),
    ("token_tis", Threshold(upper=2.0)), ("token_tis", Threshold(upper=5.0)), ("token_mis", Threshold(upper=2.0)),
    ("token_mis", Threshold(0.1, 10.0)), ("icepop", Threshold(0.5, 5.0)), ("icepop", Threshold(upper=2.0)),
    ("token_mask", Threshold(0.2, 2.0)),
]  # fmt: skip


def bounds(threshold: Threshold) -> tuple[float, float]:
    """Return the bounds as numbers, for the direct evaluation."""
    return threshold.lower or 0.0, math.inf if threshold.upper is None else threshold.upper


@pytest.mark.parametrize(("name", "threshold"), EXACT, ids=lambda value: str(value))
@pytest.mark.parametrize("largest", [0.3, 12.0])
def test_every_figure_equals_a_loop_over_tokens(name: str, threshold: Threshold, largest: float) -> None:
    batch = random_batch(seed=5, rollouts=24, largest=largest)
    found = evaluate(name, batch, threshold)
    assert found.is_exact
    assert_same(found, direct_tokens(batch, name, *bounds(correction_named(name).check(threshold))), 1e-9)


@settings(max_examples=50)
@given(
    st.sampled_from(["token_tis", "token_mis", "icepop", "token_mask"]),
    st.floats(1.0, 30.0),
    st.lists(st.lists(st.floats(-8, 14, width=32), min_size=1, max_size=9), min_size=1, max_size=9),
)
def test_between_exact_levels_figures_are_of_the_used_threshold(name: str, upper: float, d: list[list[float]]) -> None:
    batch = batch_of(d, advantage=np.linspace(-1, 2, len(d)))
    found = evaluate(name, batch, Threshold(upper=upper))
    low, high = bounds(found.used)
    assert abs(math.log(high) - math.log(upper)) <= max(math.log(upper) / 32 * (1 + 1e-9), 2**-12)
    assert found.is_exact or str(found.used) in found.notes[0]
    # A token at an edge of the grid counts as beyond it; a slightly smaller bound cuts the other tokens equally.
    low *= 1 - 1e-7 if _is_kept(low) else 1 + 1e-7
    high *= 1 + 1e-7 if _is_kept(high) else 1 - 1e-7
    expected = direct_tokens(batch, name, low, high)
    # A loose tolerance is enough: each token is a large part of the sums.
    assert_same(found, expected, relative=2e-6, absolute=1e-6)


def _is_kept(ratio: float) -> bool:
    return ratio == 0.0 or any(abs(abs(math.log(ratio)) - level) < 1e-9 for level in (0.0, *TAIL_LEVELS))


def test_token_at_edge_of_grid_is_beyond_for_its_sequence_too() -> None:
    edge = WEIGHT_GRID.lower_edge(200)
    batch = batch_of([[edge, 0.0], [-edge, 0.0], [0.0, 0.0]], behaviour=-8.0)
    found = evaluate("token_mask", batch, Threshold(upper=math.exp(edge)))
    assert found.kept_tokens == pytest.approx(4 / 6)
    assert found.kept_sequences == pytest.approx(1 / 3)


def test_token_at_exact_level_is_kept() -> None:
    batch = batch_of([[1.0, 1.0], [-1.0, 0.0], [1.125, 0.0]], behaviour=-8.0)
    found = evaluate("token_mask", batch, Threshold(upper=math.e))
    assert (found.kept_tokens, found.kept_sequences) == pytest.approx((5 / 6, 2 / 3))


@pytest.mark.parametrize("upper", [1.0 + 1e-6, 1.7, 1e300])
@pytest.mark.parametrize("name", ["token_tis", "token_mis", "icepop", "token_mask"])
def test_threshold_without_tokens_beside_it_is_met_exactly(name: str, upper: float) -> None:
    batch = batch_of([[0.3, 0.0, -0.2], [0.9, -0.9, 0.0], [40.0]], behaviour=-41.0, advantage=[1.0, -2.0, 0.5])
    found = evaluate(name, batch, Threshold(upper=upper))
    assert (found.is_exact, found.notes) == (True, ())
    assert_same(found, direct_tokens(batch, name, *bounds(found.used)))


def test_threshold_beside_exact_level_is_not_exact() -> None:
    found = evaluate("token_mis", batch_of([[1.0, 0.5], [0.2]]), Threshold(upper=2.71828))
    assert not found.is_exact
    assert found.notes[0].endswith("for 2.718281828, not 2.71828")


def test_tokens_beside_an_exact_level_are_precise_beside_a_huge_ratio() -> None:
    # ln 10 lies in the bin from 2.25 to 2.375. Beside (ρ − 1)² = 1e24 a sum of everything has no digit for the others.
    batch = batch_of([[2.28, 2.3, 2.31, 2.37, 0.1], [27.6, 24.1, 22.3]], behaviour=-28.0)
    found = evaluate("token_mis", batch, Threshold(upper=10.0))
    assert_same(found, direct_tokens(batch, "token_mis", 0.0, 10.0))


def test_overflowing_ratio_keeps_ess_and_distortion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreshock.rollouts.schema.LEAST_LOG_PROB", -math.inf)
    batch = batch_of([[720.0, 0.5], [0.1, -0.1]], behaviour=-800.0, advantage=[-1.0, 0.0])
    raw = evaluate("token_is", batch)
    assert raw.weights.effective_fraction == pytest.approx(1 / 4)
    assert (raw.distortion, raw.advantage_distortion) == (0.0, 0.0)
    masked = evaluate("token_mask", batch)
    assert (masked.distortion, masked.advantage_distortion) == (math.inf, math.inf)


def test_kept_tokens_are_precise_beside_huge_ratio() -> None:
    # ρ² of the last token is 1e24: χ² of the others, 1e-4 in all, has no digit in the sum of everything.
    small = [0.69, -0.69, *[0.01, -0.01] * 50]
    batch = batch_of([small, [27.6]], behaviour=-28.0)
    found = evaluate("token_mis", batch, Threshold(upper=2.0))
    kept = [math.exp(float(np.float32(-28.0 + d)) + 28.0) for d in small]
    assert found.weights.mean * 103 == pytest.approx(math.fsum(kept), rel=1e-12)
    squares = math.fsum(ratio * ratio for ratio in kept) / 103
    assert found.weights.variance == pytest.approx(squares - mean([*kept, 0.0]) ** 2, rel=1e-9)


def test_ess_is_nan_if_nothing_is_kept() -> None:
    found = evaluate("token_mis", batch_of([[3.5, 4.0]]))
    assert (found.kept_tokens, found.weights.mean, found.weights.variance) == (0.0, 0.0, 0.0)
    assert math.isnan(found.weights.effective_fraction)


def test_advantage_distortion_is_nan_without_advantages() -> None:
    found = evaluate("token_tis", batch_of([[0.5, 1.0]]))
    assert math.isnan(found.advantage_distortion)
