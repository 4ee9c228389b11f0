"""When a sample says too little of sequence weights: the sequences that carry them were not drawn."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from foreshock.corrections.sequences import mean

__all__ = ["unseen_weight"]


def unseen_weight(sum_k3: NDArray[np.float64]) -> tuple[str, ...]:
    """The warning that 2·KL·T > ln N, from the sums of k3 of N sequences; empty where it is not so.

    The effective fraction of sequence weights is near exp(−2·KL·T), and N sequences cannot show less than 1/N.
    """
    spread, known = 2.0 * mean(sum_k3), math.log(max(sum_k3.size, 1))
    if spread <= known:
        return ()
    found = f"2·KL of a sequence is {spread:.3g}, more than ln N = {known:.3g}"
    return (f"{found}: the sequences that carry the weight were not sampled, so what is said of ρ_seq is too small",)
