"""The sequences of a comparison as arrays, computed once for all corrections: rollouts with a measured token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foreshock.corrections.results import AffectedSequences, Population
from foreshock.corrections.sums import mean
from foreshock.measures.estimators.token import k3_kl
from foreshock.measures.rollout_summaries import RolloutSummaries

__all__ = ["Booleans", "Float64", "Sequences", "undersampling_notes"]

Float64 = NDArray[np.float64]
Booleans = NDArray[np.bool_]

# The columns of the summaries whose means a Population holds, under the same names.
_POPULATION_COLUMNS = ("reward", "advantage", "length", "turns", "lag")


@dataclass(frozen=True, eq=False)
class Sequences:
    """The M of N rollouts that have a measured token.

    `measured` [N] is True for these. `columns` maps names of the rollout summaries to float64 arrays [M], NaN if not
    logged; `clusters` [M] numbers the prompt groups.
    """

    measured: Booleans
    columns: dict[str, Float64]
    clusters: NDArray[np.int64]

    @classmethod
    def of(cls, summaries: RolloutSummaries) -> Sequences:
        """Return the sequences of these summaries."""
        measured = summaries.column("n_tokens") > 0
        names = (
            "n_tokens", "sum_d", "min_d", "max_d", "sum_k3", "sum_ratio_minus_one", "sum_tv", *_POPULATION_COLUMNS,
        )  # fmt: skip
        columns = {name: summaries.column(name)[measured].astype(np.float64) for name in names}
        _, clusters = np.unique(summaries.clusters()[measured], return_inverse=True)
        return cls(measured, columns, clusters)

    @property
    def count(self) -> int:
        """M."""
        return int(self.tokens.size)

    @property
    def tokens(self) -> Float64:
        """[M] measured tokens per sequence."""
        return self.columns["n_tokens"]

    @property
    def log_weights(self) -> Float64:
        """[M] log ρ_seq = Σ d, in nats."""
        return self.columns["sum_d"]

    @cached_property
    def total_tokens(self) -> float:
        """Measured tokens of all sequences."""
        return float(self.tokens.sum())

    @cached_property
    def ratios_minus_one(self) -> Float64:
        """[M] ρ_seq − 1; infinite on overflow."""
        with np.errstate(over="ignore"):
            return np.expm1(self.log_weights)

    @cached_property
    def mean_k3(self) -> Float64:
        """[M] mean k3 of the tokens of each sequence, in nats."""
        return self.columns["sum_k3"] / self.tokens

    @cached_property
    def largest_k3(self) -> Float64:
        """[M] largest k3 of a token of each sequence, in nats.

        k3 is convex in d with its minimum at 0, so the largest value is at the smallest or the largest d.
        """
        with np.errstate(over="ignore"):
            return np.maximum(k3_kl(self.columns["min_d"]), k3_kl(self.columns["max_d"]))

    @cached_property
    def group_sizes(self) -> NDArray[np.int64]:
        """[G] sequences per prompt group; a rollout without a group is a group of its own."""
        return np.bincount(self.clusters, minlength=1)

    def affected(self, touched: Booleans) -> AffectedSequences:
        """Compare the sequences that a correction touches, `touched` [M], with the others."""
        real = self.group_sizes >= 2
        groups = int(real.sum())
        shares = (math.nan, math.nan)
        if groups:
            per_group = np.bincount(self.clusters[touched], minlength=self.group_sizes.size)[real]
            emptied = per_group == self.group_sizes[real]
            shares = (float((per_group > 0).sum() / groups), float(emptied.sum() / groups))
        return AffectedSequences(self._population(touched), self._population(~touched), groups, *shares)

    @cached_property
    def _all(self) -> Population:
        return self._means(slice(None), self.count)

    def _population(self, chosen: Booleans) -> Population:
        count = int(chosen.sum())
        return self._all if count == self.count else self._means(chosen, count)

    def _means(self, chosen: Booleans | slice, count: int) -> Population:
        if count == 0:
            return Population(0)
        return Population(count, *(self._mean_of(name, chosen) for name in _POPULATION_COLUMNS))

    def _mean_of(self, name: str, chosen: Booleans | slice) -> float:
        values = self.columns[name][chosen]
        return mean(values[np.isfinite(values)])


def undersampling_notes(sum_k3: Float64) -> tuple[str, ...]:
    """Return a note if 2·KL·T > ln N, from the Σ k3 of N sequences in nats [N]; else no note.

    The effective fraction of sequence weights is near exp(−2·KL·T), and N sequences cannot show less than 1/N.
    """
    spread, known = 2.0 * mean(sum_k3), math.log(max(sum_k3.size, 1))
    if spread <= known:
        return ()
    found = f"2·KL of a sequence is {spread:.3g}, more than ln N = {known:.3g}"
    return (f"{found}: the sequences that carry the weight were not sampled, so figures of ρ_seq are too small",)
