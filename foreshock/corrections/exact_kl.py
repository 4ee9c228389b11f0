"""Exact KLs of tokens, over the whole vocabulary, as masks by trust region need them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.errors import InvalidArgumentError

__all__ = ["ExactKl"]


@dataclass(frozen=True, slots=True, eq=False)
class ExactKl:
    """The largest and the mean exact KL(μ‖π) of the tokens of N rollouts, both [N] in nats; NaN where one has none."""

    largest: NDArray[np.float64]
    mean: NDArray[np.float64]

    @classmethod
    def of_tokens(cls, kl: ArrayLike, offsets: ArrayLike, generated: ArrayLike | None = None) -> ExactKl:
        """From the exact KL of each token, [T], of rollouts cut at `offsets` [N + 1].

        `generated` [T] is False where the model did not sample. A KL is infinite where π gives nothing to what μ may
        sample; no threshold keeps its rollout. Raises InvalidArgumentError where the sizes do not fit, or a KL is NaN
        or negative beyond rounding.
        """
        values, cuts = np.asarray(kl, dtype=np.float64), np.asarray(offsets, dtype=np.int64)
        if cuts.ndim != 1 or cuts.size == 0 or cuts[0] != 0 or (np.diff(cuts) < 0).any():
            raise InvalidArgumentError("offsets must rise from 0 and have N + 1 entries", "offsets")
        if values.shape != (int(cuts[-1]),):
            raise InvalidArgumentError(f"has the shape {values.shape} and must be [{int(cuts[-1])}]", "kl")
        chosen = np.ones(values.size, np.bool_) if generated is None else np.asarray(generated, dtype=np.bool_)
        if chosen.shape != values.shape:
            raise InvalidArgumentError(f"has the shape {chosen.shape} and must be {values.shape}", "generated")
        if not (values[chosen] >= -1e-6).all():
            raise InvalidArgumentError("an exact KL is a number of at least 0", "kl")
        rows = np.repeat(np.arange(cuts.size - 1), np.diff(cuts))[chosen]
        counts = np.bincount(rows, minlength=cuts.size - 1)
        largest = np.full(cuts.size - 1, -np.inf)
        np.maximum.at(largest, rows, values[chosen])
        totals = np.bincount(rows, weights=values[chosen], minlength=cuts.size - 1)
        with np.errstate(invalid="ignore"):
            return cls(np.where(counts > 0, largest, np.nan), totals / counts)

    def of_kind(self, kind: str) -> NDArray[np.float64]:
        """`max` or `mean`, [N]."""
        return self.largest if kind == "max" else self.mean
