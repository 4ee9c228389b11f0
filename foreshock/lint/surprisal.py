"""Evidence for the surprisal test: does −log μ of the sampled tokens average to the entropy of the law they came from?

Σ(−log μ(a) − H(μ)) is a martingale where the logged μ is the law that sampled: its mean is 0 whatever the text.
Log-probs taken before temperature or truncation leave every ratio perfect, and this one sum wrong.

How far it strays by chance needs the variance of s = −log μ(a), which nobody logs, and which a sample can show too
small: where a policy is sharp, rare tokens carry nearly all of it, and may be missing from a batch. There (H ≤ 0.5) it
is taken from the entropy: E[s²] ≈ H·(H + 4 + log⁺(1/H)), that of one likely token beside a dozen unlikely ones. As
s ≥ 0, P(Σ(H − s) ≥ x) ≤ exp(−x²/2V) with V = Σ E[s²], for any dependence on the past (Maurer 2003, "A bound on the
deviation probability for sums of non-negative random variables"; its proof goes through for martingales). Where it is
broad, no single token matters, and the squares that were seen say the variance, once there are some hundred.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.tally import Tally
from foreshock.lint.tokens import Piece, row_sums

__all__ = ["is_entropy", "surprisals_of"]

# Above this entropy, in nats, a distribution is broad: its variance shows in a few hundred tokens.
_BROAD = 0.5
# No distribution over tokens has an entropy beyond these; below 0 by rounding only.
_LEAST_ENTROPY, _LARGEST_ENTROPY = -0.01, 100.0


def is_entropy(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """[T] where these can be entropies; NaN compares False, as what is no entropy should."""
    return np.asarray((values >= _LEAST_ENTROPY) & (values <= _LARGEST_ENTROPY))


def surprisals_of(piece: Piece, tally: Tally) -> NDArray[np.float64]:
    """[N] Σ(−log μ − H) by rollout over tokens with a finite log μ; tokens without an entropy take no part."""
    if piece.rollout is None or piece.entropy is None or piece.tokens == 0:
        return np.zeros(piece.offsets.size - 1)
    piece = piece.kept(is_entropy(piece.entropy))
    entropy = piece.entropy
    assert entropy is not None
    assert piece.rollout is not None
    log_probs = row_sums(piece.rollout, piece.offsets)
    entropies = row_sums(entropy, piece.offsets)
    positive = np.maximum(entropy, np.float32(1e-30))
    # H² + 4H + H·log⁺(1/H)
    bound = positive * (positive + np.float32(4.0) - np.minimum(np.log(positive), np.float32(0.0)))
    broad = np.flatnonzero(entropy > np.float32(_BROAD))
    tally.count(surprisal_tokens=piece.tokens, broad_tokens=broad.size)
    of_broad = float(bound[broad].sum(dtype=np.float64))
    tally.add(
        surprisal=-float(log_probs.sum()),
        entropy=float(entropies.sum()),
        sharp_bound=float(bound.sum(dtype=np.float64)) - of_broad,
        broad_bound=of_broad,
        broad_squares=float(np.square(piece.rollout[broad] + entropy[broad]).sum(dtype=np.float64)),
    )
    tally.largest({"largest_surprisal": -float(piece.rollout.min(initial=0.0))})
    return -log_probs - entropies
