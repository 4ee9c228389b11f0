"""Means and centred second moments of K quantities. They merge without the difference of two large sums.

With the number n and the mean m of each part, Σ (x − M)(x − M)ᵀ over all parts is the sum of their own moments, and of
n·(m − M)(m − M)ᵀ between them (Chan, Golub and LeVeque 1979).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """The number of values, their `means` [K], and `products` [K, K] = Σ (x − mean)(x − mean)ᵀ; 0 without values."""

    count: int
    means: Float64
    products: Float64

    @classmethod
    def of_parts(cls, counts: NDArray[np.int64], sums: Float64, products: Float64) -> Moments:
        """Return the moments of N parts: `counts` [N], `sums` [N, K], `products` [N, K, K] about the parts' means."""
        filled = counts > 0
        counts, sums, products = counts[filled], sums[filled], products[filled]
        total = int(counts.sum())
        if not total:
            return cls(0, np.zeros(sums.shape[1]), np.zeros(products.shape[1:]))
        with np.errstate(invalid="ignore", over="ignore"):
            means = sums.sum(axis=0) / total
            shifts = sums / counts[:, None] - means
            between = np.einsum("n,ni,nj->ij", counts.astype(np.float64), shifts, shifts)
            return cls(total, means, products.sum(axis=0) + between)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the values of both."""
        if not other.count:
            return self
        if not self.count:
            return other
        counts = np.array([self.count, other.count])
        sums = np.stack([self.means, other.means]) * counts[:, None]
        return Moments.of_parts(counts, sums, np.stack([self.products, other.products]))

    def to_array(self) -> Float64:
        """Return means and products as stored in blobs, [K + K²]; the count is stored with the integers."""
        return np.concatenate([self.means, self.products.ravel()])

    @classmethod
    def from_array(cls, count: int, values: Float64, size: int) -> Moments:
        """Restore the moments of `size` = K quantities from `to_array()`."""
        return cls(count, values[:size], values[size:].reshape(size, size))
