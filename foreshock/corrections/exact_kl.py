"""Exact KLs of tokens over the whole vocabulary, as trust region masks need them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.errors import InvalidArgumentError

__all__ = ["ExactKl"]


@dataclass(frozen=True, slots=True, eq=False)
class ExactKl:
    """The largest and the mean exact KL(μ‖π) of the tokens of N rollouts, [N] in nats; NaN for one without tokens."""

    largest: NDArray[np.float64]
    mean: NDArray[np.float64]

    @classmethod
    def of_tokens(cls, kl: ArrayLike, offsets: ArrayLike, generated: ArrayLike | None = None) -> ExactKl:
        """Return them from the exact KL of each token, [T] in nats, of rollouts cut at `offsets` [N + 1].

        `generated` [T] is False for tokens that the model did not sample. A KL is infinite if π is 0 for a token that μ
        may sample; no threshold keeps such a rollout. Raises InvalidArgumentError if the sizes do not fit, or if a KL
        is NaN or negative by more than rounding.
        """
        values, cuts = np.asarray(kl, dtype=np.float64), np.asarray(offsets, dtype=np.int64)
        if cuts.ndim != 1 or cuts.size == 0 or cuts[0] != 0 or (np.diff(cuts) < 0).any():
            raise InvalidArgumentError("must start at 0, never fall, and have N + 1 entries", "offsets")
        if values.shape != (int(cuts[-1]),):
            raise InvalidArgumentError(
                f"must have the shape [{int(cuts[-1])}] of the offsets, got {list(values.shape)}", "kl"
            )
        chosen = np.ones(values.size, np.bool_) if generated is None else np.asarray(generated, dtype=np.bool_)
        if chosen.shape != values.shape:
            raise InvalidArgumentError(
                f"must have the shape {list(values.shape)} of `kl`, got {list(chosen.shape)}", "generated"
            )
        if not (values[chosen] >= -1e-6).all():
            raise InvalidArgumentError("an exact KL must be a number of at least 0", "kl")
        rows = np.repeat(np.arange(cuts.size - 1), np.diff(cuts))[chosen]
        counts = np.bincount(rows, minlength=cuts.size - 1)
        largest = np.full(cuts.size - 1, -np.inf)
        np.maximum.at(largest, rows, values[chosen])
        totals = np.bincount(rows, weights=values[chosen], minlength=cuts.size - 1)
        with np.errstate(invalid="ignore"):
            return cls(np.where(counts > 0, largest, np.nan), totals / counts)

    def of_kind(self, kind: str) -> NDArray[np.float64]:
        """Return `max` or `mean` by name, [N] in nats."""
        return self.largest if kind == "max" else self.mean
