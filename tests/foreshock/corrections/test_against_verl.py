"""Evaluated corrections against verl's own functions: kept fractions and weights are equal."""

import math

import numpy as np
import pytest

from foreshock.corrections import Evaluator, Threshold
from tests.foreshock.batches import compared
from tests.foreshock.corrections.direct import batch_of

pytestmark = pytest.mark.slow

# verl's option and its threshold, and the same here.
MASKS = [
    ("token_k1", "0.5_2.0", "token_mask", Threshold(0.5, 2.0)),
    ("seq_sum_k1", "0.5_2.0", "sequence_mis", Threshold(0.5, 2.0)),
    ("seq_mean_k1", "0.8_1.25", "geo_mis", Threshold(0.8, 1.25)),
    # verl's k1 is −log ρ: its bounds are those of 1/ρ.
    ("seq_mean_k1", "0.9_1.05", "geo_mis", Threshold(1 / 1.05, 1 / 0.9)),
    ("seq_mean_k3", 0.01, "k3_rs_mean", None),
    ("seq_sum_k3", 2.5, "k3_rs_sum", None),
    ("seq_max_k3", 2.0, "k3_rs_max", None),
]
WEIGHTS = [
    ("token", 2.0, "token_tis", Threshold(upper=2.0)),
    ("token", "0.5_5.0", "icepop", Threshold(0.5, 5.0)),
    ("sequence", 2.0, "sequence_tis", Threshold(upper=2.0)),
]


def drawn() -> list[list[float]]:
    """Return d of sequences with little and with large mismatch."""
    generator = np.random.default_rng(1)
    lengths, spreads = generator.integers(3, 60, 200), generator.choice([0.01, 0.3, 2.0], 200)
    return [
        generator.normal(-0.001, spread, length).clip(-15, 15).tolist()
        for length, spread in zip(lengths, spreads, strict=True)
    ]


def test_kept_fractions_and_weights_equal_those_of_verl() -> None:
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason="verl is not installed")
    torch = pytest.importorskip("torch")
    batch = batch_of(drawn())
    comparison = compared(batch)
    evaluator = Evaluator(comparison.statistics, comparison.summaries)
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    differences = batch.trainer_log_probs.astype(np.float64) - batch.rollout_log_probs
    log_ratio = torch.zeros(batch.num_rollouts, int(batch.response_lengths.max()), dtype=torch.float64)
    mask = torch.zeros_like(log_ratio)
    for row, (first, end) in enumerate(zip(batch.response_offsets, batch.response_offsets[1:], strict=False)):
        log_ratio[row, : end - first] = torch.from_numpy(differences[first:end])
        mask[row, : end - first] = 1
    for option, bounds, name, threshold in MASKS:
        kept, _ = helper.compute_rollout_rejection_mask(log_ratio, mask, rollout_rs=option, rollout_rs_threshold=bounds)
        found = evaluator.evaluate(name, threshold)
        assert 0.0 < found.kept_sequences < 1.0
        assert found.kept_tokens == pytest.approx(float(kept.sum() / mask.sum()), rel=1e-12), option
        whole = (kept.sum(dim=1) == mask.sum(dim=1)).double().mean()
        assert found.kept_sequences == pytest.approx(float(whole), rel=1e-12), option
    for level, bounds, name, threshold in WEIGHTS:
        weights, _ = helper.compute_rollout_correction_weights(
            log_ratio, mask, rollout_is=level, rollout_is_threshold=bounds
        )
        values = weights[mask.bool()] if level == "token" else weights[:, 0]
        moments = evaluator.evaluate(name, threshold).weights
        assert moments.mean == pytest.approx(float(values.mean()), rel=1e-9), name
        assert moments.variance == pytest.approx(float(values.var(unbiased=False)), rel=1e-9), name
        effective = values.sum() ** 2 / (values.numel() * values.square().sum())
        assert moments.effective_fraction == pytest.approx(float(effective), rel=1e-9), name
        assert math.isfinite(moments.mean)
