"""Sequence corrections against the direct evaluation, at any threshold."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.corrections import Threshold, correction_named
from foreshock.corrections.sequences import undersampling_notes
from tests.foreshock.batches import compared, random_batch
from tests.foreshock.corrections.direct import assert_same, batch_of, direct_sequences, evaluate, flat, sequences_of

CASES = [
    ("none_sequence", Threshold()), ("sequence_is", Threshold()), ("sequence_tis", Threshold(upper=2.0)),
    ("sequence_tis", Threshold(upper=1.37)), ("sequence_mis", Threshold(upper=2.0)),
    ("sequence_mis", Threshold(0.5, 2.0)), ("geo_mis", Threshold(0.999, 1.001)), ("geo_mis", Threshold(upper=1.1)),
    ("k3_rs_mean", Threshold(upper=0.01)), ("k3_rs_sum", Threshold(upper=0.3)), ("k3_rs_max", Threshold(upper=0.08)),
    ("veto", Threshold(lower=1e-4)), ("veto", Threshold(lower=0.8)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "threshold"), CASES, ids=str)
@pytest.mark.parametrize("largest", [0.3, 12.0])
def test_every_figure_equals_a_loop_over_tokens(name: str, threshold: Threshold, largest: float) -> None:
    batch = random_batch(seed=6, rollouts=40, longest=20, largest=largest)
    found = evaluate(name, batch, threshold)
    assert found.is_exact
    complete = correction_named(name).check(threshold)
    high = math.inf if complete.upper is None else complete.upper
    assert_same(found, direct_sequences(batch, name, complete.lower or 0.0, high))


@settings(max_examples=40)
@given(
    st.sampled_from(["sequence_tis", "sequence_mis", "geo_mis", "k3_rs_mean", "k3_rs_sum", "k3_rs_max"]),
    st.floats(1.0, 30.0),
    st.lists(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=9), min_size=1, max_size=9),
)
def test_any_threshold_is_met_exactly(name: str, upper: float, d: list[list[float]]) -> None:
    batch = batch_of(d, advantage=np.linspace(-1, 2, len(d)), group_ids=["one", *["two"] * (len(d) - 1)])
    found = evaluate(name, batch, Threshold(upper=upper))
    assert found.is_exact
    expected = direct_sequences(batch, name, found.used.lower or 0.0, upper)
    close = any(_is_close(name, sequence.d, upper) for sequence in sequences_of(batch))
    if not close:
        assert_same(found, expected, relative=1e-9, absolute=1e-9)


def _is_close(name: str, d: list[float], upper: float) -> bool:
    """Return True if rounding may decide on which side of the threshold a sequence lies."""
    log = math.fsum(d) / (len(d) if name == "geo_mis" else 1)
    k3 = [math.expm1(value) - value for value in d]
    of_k3 = [math.fsum(k3) / len(k3), math.fsum(k3), max(k3)]
    return abs(abs(log) - math.log(upper)) < 1e-12 or any(math.isclose(value, upper, rel_tol=1e-12) for value in of_k3)


def sampled_batch(kl: float, length: int, rollouts: int, seed: int) -> list[list[float]]:
    """Return d of sequences sampled from μ, normal with variance σ² = 2·KL: E ρ = 1 and KL(μ‖π) = σ²/2."""
    generator = np.random.default_rng(seed)
    drawn = generator.normal(-kl, math.sqrt(2 * kl), (rollouts, length))
    return [row.tolist() for row in drawn]


def test_long_sequences_at_ordinary_mismatch_are_undersampled() -> None:
    # ESS is near exp(−2·KL·T) = exp(−10.5): a sample of 64 cannot show it, which a note reports.
    found = evaluate("sequence_is", batch_of(sampled_batch(6.4e-4, 8192, 64, seed=4)))
    assert found.weights.effective_fraction > 10 * math.exp(-2 * 6.4e-4 * 8192)
    assert "not sampled" in found.notes[0]
    short = compared(batch_of(sampled_batch(6.4e-4, 128, 64, seed=4)))
    assert evaluate("sequence_is", short).notes == ()


def test_undersampling_is_noted_if_twice_the_kl_exceeds_ln_n() -> None:
    # ln 64 is 4.16.
    assert undersampling_notes(np.full(64, 2.0)) == ()
    assert "2·KL of a sequence is 4.4, more than ln N = 4.16" in undersampling_notes(np.full(64, 2.2))[0]


@pytest.mark.parametrize(
    ("name", "threshold"),
    [
        ("sequence_mis", Threshold(math.exp(-1.0), math.e)),
        ("geo_mis", Threshold(math.exp(-0.5), math.exp(0.5))),
        ("k3_rs_max", Threshold(upper=math.expm1(0.5) - 0.5)),
        ("veto", Threshold(lower=math.exp(-0.5))),
    ],
)
def test_sequence_at_threshold_is_kept(name: str, threshold: Threshold) -> None:
    found = evaluate(name, batch_of([[0.5, 0.5], [-0.5, -0.5], [-0.6, -0.6, 0.6]], behaviour=-2.0), threshold)
    assert found.kept_sequences == pytest.approx({"k3_rs_max": 2 / 3, "veto": 2 / 3}.get(name, 1.0))


def test_overflowing_weights_are_infinite_with_finite_ess() -> None:
    comparison = compared(batch_of([[20.0] * 40, [20.0] * 40, [0.1]]))
    raw = evaluate("sequence_is", comparison)
    assert (raw.weights.mean, raw.weights.variance) == (math.inf, math.inf)
    assert raw.weights.effective_fraction == pytest.approx(2 / 3)
    assert raw.distortion == 0.0
    cut = evaluate("sequence_tis", comparison)
    assert (cut.distortion, cut.uncorrected_distortion) == (math.inf, math.inf)
    assert cut.weights.mean == pytest.approx((2 + 2 + math.exp(0.1)) / 3, rel=1e-4)


def test_infinite_ratio_with_zero_advantage_adds_nothing() -> None:
    found = evaluate("sequence_tis", batch_of([[20.0] * 40, [0.5]], advantage=[0.0, 2.0]), Threshold(upper=1.2))
    assert found.advantage_distortion == pytest.approx(1.2 - math.exp(0.5), rel=1e-5)
    assert found.distortion == math.inf


def test_rollouts_with_a_missing_log_prob_are_left_out_and_counted() -> None:
    """The known truth is the same batch without them; a sum over a part of a sequence is no ratio of it."""
    d = [[0.5, 0.4], [-0.3, 0.1, 0.2], [0.9, 0.1], [0.05]]
    whole = batch_of(d, reward=[1.0, 0.0, 1.0, 0.0], advantage=[1.0, -1.0, 2.0, 0.5])
    assert whole.trainer_log_probs is not None
    log_probs = whole.trainer_log_probs.copy()
    log_probs[[1, 5]] = math.nan, -math.inf  # the second token of the first rollout, the first of the third
    others = compared(whole.select([1, 3]))
    for name, threshold in (*CASES, ("token_mask", Threshold(0.5, 2.0))):
        found = evaluate(name, dataclasses.replace(whole, trainer_log_probs=log_probs), threshold)
        expected = evaluate(name, others, threshold)
        assert repr(found.affected) == repr(expected.affected)
        if found.correction.level == "sequence":
            assert flat(found) == pytest.approx(flat(expected), nan_ok=True), name
            assert found.notes[0].endswith("their ρ_seq is unknown: 2")
    nothing = compared(dataclasses.replace(whole, trainer_log_probs=np.full(whole.num_tokens, math.nan, np.float32)))
    assert evaluate("sequence_is", nothing).not_estimable
    first = compared(dataclasses.replace(whole, trainer_log_probs=log_probs).select([0]))
    found = evaluate("sequence_is", first)
    assert found.not_estimable == "no rollout has two finite log-probs for each of its tokens"
    assert evaluate("token_is", first).kept_tokens == 1.0
