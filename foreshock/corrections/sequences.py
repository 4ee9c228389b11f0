"""The sequences of a comparison as arrays, made once for all corrections: rollouts with a measured token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foreshock.corrections.results import Population
from foreshock.measures.estimators.token import k3_kl
from foreshock.measures.rollout_summaries import RolloutSummaries

__all__ = ["Booleans", "Float64", "Sequences", "mean"]

Float64 = NDArray[np.float64]
Booleans = NDArray[np.bool_]

# What is known of a sequence beside its tokens, as Population names it.
_KNOWN = ("reward", "advantage", "length", "turns", "lag")


@dataclass(frozen=True, eq=False)
class Sequences:
    """The M of N rollouts that have a measured token: `measured` [N] says which, `columns` holds [M] arrays by name.

    The columns are those of the rollout summaries as float64, NaN where nothing was logged.
    """

    measured: Booleans
    columns: dict[str, Float64]
    clusters: NDArray[np.int64]

    @classmethod
    def of(cls, summaries: RolloutSummaries) -> Sequences:
        """The sequences of these summaries."""
        measured = summaries.column("n_tokens") > 0
        names = ("n_tokens", "sum_d", "min_d", "max_d", "sum_k3", "sum_ratio_minus_one", "sum_tv", *_KNOWN)
        columns = {name: summaries.column(name)[measured].astype(np.float64) for name in names}
        _, clusters = np.unique(summaries.clusters()[measured], return_inverse=True)
        return cls(measured, columns, clusters)

    @property
    def count(self) -> int:
        """M."""
        return int(self.tokens.size)

    @property
    def tokens(self) -> Float64:
        """[M] measured tokens of each."""
        return self.columns["n_tokens"]

    @property
    def log_weights(self) -> Float64:
        """[M] log ρ_seq = Σ d."""
        return self.columns["sum_d"]

    @cached_property
    def total_tokens(self) -> float:
        """Measured tokens of all of them."""
        return float(self.tokens.sum())

    @cached_property
    def ratios_minus_one(self) -> Float64:
        """[M] ρ_seq − 1; infinite beyond float64."""
        with np.errstate(over="ignore"):
            return np.expm1(self.log_weights)

    @cached_property
    def mean_k3(self) -> Float64:
        """[M] the mean k3 of the tokens of each."""
        return self.columns["sum_k3"] / self.tokens

    @cached_property
    def largest_k3(self) -> Float64:
        """[M] the largest k3 of a token of each: k3 is convex with its minimum at 0, so it is at one end of d."""
        with np.errstate(over="ignore"):
            return np.maximum(k3_kl(self.columns["min_d"]), k3_kl(self.columns["max_d"]))

    @cached_property
    def group_sizes(self) -> NDArray[np.int64]:
        """[G] sequences of each prompt group; a rollout without a group is one of its own."""
        return np.bincount(self.clusters, minlength=1)

    @cached_property
    def everyone(self) -> Population:
        """All of them."""
        return self._population(slice(None), self.count)

    def population(self, chosen: Booleans) -> Population:
        """The sequences with `chosen` [M]."""
        count = int(chosen.sum())
        return self.everyone if count == self.count else self._population(chosen, count)

    def _population(self, chosen: Booleans | slice, count: int) -> Population:
        if count == 0:
            return Population(0)
        return Population(count, *(self._mean_of(name, chosen) for name in _KNOWN))

    def _mean_of(self, name: str, chosen: Booleans | slice) -> float:
        values = self.columns[name][chosen]
        return mean(values[np.isfinite(values)])


def mean(values: Float64) -> float:
    """Σ / n by pairwise summation; NaN of nothing, infinite where the sum leaves float64."""
    if not values.size:
        return float("nan")
    with np.errstate(over="ignore", invalid="ignore"):
        return float(values.sum()) / values.size
