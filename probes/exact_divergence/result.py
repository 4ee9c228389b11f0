"""What is known of two distributions over the whole vocabulary, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

__all__ = ["ExactDivergences"]

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ExactDivergences:
    """Divergences between the sampling distribution μ and the trained one, π, at T states; all arrays [T].

    | field | unit | estimated from tokens drawn from μ by |
    | --- | --- | --- |
    | `kl` KL(μ‖π) | nats | `kl`, `k3_kl` |
    | `reverse_kl` KL(π‖μ) | nats | |
    | `tv` ½ Σ|π − μ| | 0 … 1 | `tv_token` |
    | `chi2` χ²(π‖μ) = Σ (π − μ)²/μ | | `chi2_token` |
    | `reverse_chi2` χ²(μ‖π) = Σ (π − μ)²/π | | `reverse_chi2_token` |
    | `mean_ratio` E_μ ρ: π's probability where μ > 0 | 0 … 1 | `mean_ratio` |
    | `behaviour_entropy`, `target_entropy` H(μ), H(π) | nats | |

    A divergence whose support is not covered is infinite. At a state where a logit is NaN or +inf, or all are −inf,
    everything is NaN and nothing flips.

    `top1_flip` is True where the likeliest tokens differ. `topk_overlap` [T, len(top_ks)] is the share of tokens that
    the k likeliest of both have in common, for each k of `top_ks`. Among equally likely tokens the lower id comes
    first; tokens of probability 0 by mask are never among them. The log-probs are those of the token ids asked for.
    """

    kl: Float64
    reverse_kl: Float64
    tv: Float64
    chi2: Float64
    reverse_chi2: Float64
    mean_ratio: Float64
    behaviour_entropy: Float64
    target_entropy: Float64
    top1_flip: NDArray[np.bool_]
    topk_overlap: Float64
    top_ks: tuple[int, ...]
    behaviour_log_probs: Float64 | None = None
    target_log_probs: Float64 | None = None

    @property
    def tokens(self) -> int:
        return self.kl.size

    @property
    def delta_max(self) -> float:
        """Δmax: the largest total variation at the states visited, 0 … 1; NaN where there is none.

        A lower bound of the supremum over all states, and the only honest one: sampled |1 − ρ| says nothing of it.
        """
        known = self.tv[~np.isnan(self.tv)]
        return float(known.max()) if known.size else math.nan

    @classmethod
    def concatenate(cls, parts: Sequence[ExactDivergences]) -> ExactDivergences:
        """The states of all parts (at least one; all asked for the same) in their order."""
        values = {}
        for field in fields(cls):
            found = [getattr(part, field.name) for part in parts]
            shared = field.name == "top_ks" or found[0] is None
            values[field.name] = found[0] if shared else np.concatenate(found)
        return cls(**values)
