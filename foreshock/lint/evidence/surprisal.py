"""Sums for the surprisal test: does −log μ of the sampled tokens average to the entropy of μ?

If the logged μ is the sampling distribution, Σ(−log μ(a) − H(μ)) is a martingale: its mean is 0 for any text. Log-probs
taken before temperature or truncation leave every ratio ρ unchanged, and only this sum is off.

The size of its chance deviations needs the variance of s = −log μ(a), which is not logged. The sample variance can be
far too small: if a policy is sharp, rare tokens carry nearly all of the variance, and a batch may contain none of them.
There (H ≤ 0.5) it is taken from the entropy: E[s²] ≈ H·(H + 4 + log⁺(1/H)), the value for one likely token beside a
dozen unlikely ones. As s ≥ 0, P(Σ(H − s) ≥ x) ≤ exp(−x²/2V) with V = Σ E[s²], for any dependence on the past (Maurer
2003, "A bound on the deviation probability for sums of non-negative random variables"; the proof also holds for
martingales). If a policy is broad, no single token matters, and the sample variance is used from 500 tokens on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.evidence.builder import EvidenceBuilder
from foreshock.lint.evidence.pieces import Piece, row_sums

__all__ = ["is_entropy", "sum_surprisals"]

# Above this entropy, in nats, a distribution is broad: a few hundred tokens show its variance.
_BROAD = 0.5
# The range of the entropy of a distribution over tokens, in nats; below 0 by rounding only.
_LEAST_ENTROPY, _LARGEST_ENTROPY = -0.01, 100.0


def is_entropy(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return True for values that can be entropies, shape [T]; False for NaN."""
    return np.asarray((values >= _LEAST_ENTROPY) & (values <= _LARGEST_ENTROPY))


def sum_surprisals(piece: Piece, builder: EvidenceBuilder) -> NDArray[np.float64]:
    """Return Σ(−log μ − H) by rollout in nats, shape [N], over the tokens of a piece that have a valid entropy.

    Every log μ of the piece must be finite.
    """
    if piece.rollout is None or piece.entropy is None or piece.tokens == 0:
        return np.zeros(piece.offsets.size - 1)
    piece = piece.select(is_entropy(piece.entropy))
    entropy = piece.entropy
    assert entropy is not None
    assert piece.rollout is not None
    log_probs = row_sums(piece.rollout, piece.offsets)
    entropies = row_sums(entropy, piece.offsets)
    positive = np.maximum(entropy, np.float32(1e-30))
    # H² + 4H + H·log⁺(1/H)
    bound = positive * (positive + np.float32(4.0) - np.minimum(np.log(positive), np.float32(0.0)))
    broad = np.flatnonzero(entropy > np.float32(_BROAD))
    builder.count(surprisal_tokens=piece.tokens, broad_tokens=broad.size)
    of_broad = float(bound[broad].sum(dtype=np.float64))
    builder.add(
        surprisal=-float(log_probs.sum()),
        entropy=float(entropies.sum()),
        sharp_bound=float(bound.sum(dtype=np.float64)) - of_broad,
        broad_bound=of_broad,
        broad_squares=float(np.square(piece.rollout[broad] + entropy[broad]).sum(dtype=np.float64)),
    )
    builder.raise_extremes({"largest_surprisal": -float(piece.rollout.min(initial=0.0))})
    return -log_probs - entropies
