"""The sequences of a comparison, one row of rollout summaries each: their ratios, and what sets some of them apart.

Only whole rollouts are sequences: ρ_seq = exp(Σ d) of a part of the tokens is not the ratio of the sequence. The others
are left out and counted. A ρ_seq is infinite on overflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foreshock.api.steps import AffectedRecord, PopulationRecord
from foreshock.measures.estimators.token import k3_kl
from foreshock.measures.rollout_summaries import RolloutSummaries

Float64 = NDArray[np.float64]
Booleans = NDArray[np.bool_]


def mean(values: Float64) -> float:
    """Return the mean by pairwise summation; NaN of no values, infinite on overflow."""
    if not values.size:
        return float("nan")
    with np.errstate(over="ignore", invalid="ignore"):
        return float(values.sum()) / values.size


# The columns of the summaries whose means a population holds.
_POPULATION_COLUMNS = ("reward", "advantage", "length", "turns", "lag")
NO_SEQUENCES = PopulationRecord(sequences=0, **{f"{name}_mean": math.nan for name in _POPULATION_COLUMNS})


@dataclass(frozen=True, eq=False)
class Sequences:
    """The M whole rollouts of a comparison; `incomplete` others lack a log-prob of a token.

    `columns` maps names of the rollout summaries to float64 arrays [M], NaN if not logged; `clusters` [M] numbers the
    prompt groups.
    """

    columns: dict[str, Float64]
    clusters: NDArray[np.int64]
    incomplete: int

    @classmethod
    def of(cls, summaries: RolloutSummaries) -> Sequences:
        """Return the sequences of these summaries."""
        whole = summaries.whole()
        names = (
            "n_tokens", "sum_d", "min_d", "max_d", "sum_k3", "sum_ratio_minus_one", "sum_tv", *_POPULATION_COLUMNS,
        )  # fmt: skip
        columns = {name: summaries.column(name)[whole].astype(np.float64) for name in names}
        _, clusters = np.unique(summaries.clusters()[whole], return_inverse=True)
        incomplete = int((summaries.column("n_tokens") < summaries.column("length")).sum())
        return cls(columns, clusters, incomplete)

    @property
    def count(self) -> int:
        """M."""
        return int(self.tokens.size)

    @property
    def tokens(self) -> Float64:
        """[M] tokens per sequence."""
        return self.columns["n_tokens"]

    @property
    def log_weights(self) -> Float64:
        """[M] log ρ_seq = Σ d, in nats."""
        return self.columns["sum_d"]

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

    def notes(self) -> tuple[str, ...]:
        """Return a note on the rollouts that are left out, and one if the weights were not sampled."""
        return (*incomplete_notes(self.incomplete), *undersampling_notes(self.columns["sum_k3"]))

    def affected(self, touched: Booleans) -> AffectedRecord:
        """Compare the sequences that a correction touches (`touched` [M] is True) with the untouched ones."""
        real = self.group_sizes >= 2
        groups = int(real.sum())
        shares = (math.nan, math.nan)
        if groups:
            per_group = np.bincount(self.clusters[touched], minlength=self.group_sizes.size)[real]
            emptied = per_group == self.group_sizes[real]
            shares = (float((per_group > 0).sum() / groups), float(emptied.sum() / groups))
        return AffectedRecord(
            touched=self._population(touched),
            untouched=self._population(~touched),
            groups=groups,
            groups_touched=shares[0],
            groups_emptied=shares[1],
        )

    def _population(self, chosen: Booleans) -> PopulationRecord:
        columns = {name: self.columns[name][chosen] for name in _POPULATION_COLUMNS}
        means = {f"{name}_mean": mean(values[np.isfinite(values)]) for name, values in columns.items()}
        return PopulationRecord(sequences=int(chosen.sum()), **means)


def incomplete_notes(rollouts: int) -> tuple[str, ...]:
    """Return a note on the number of rollouts that are left out because they are not whole; else no note."""
    known = "rollouts left out because a token lacks a log-prob, so that their ρ_seq is unknown"
    return (f"{known}: {rollouts}",) if rollouts else ()


def undersampling_notes(sum_k3: Float64) -> tuple[str, ...]:
    """Return a note if 2·KL·T > ln N, from the Σ k3 of N sequences in nats [N]; else no note.

    The effective fraction of sequence weights is near exp(−2·KL·T), and N sequences cannot show less than 1/N.
    """
    spread, known = 2.0 * mean(sum_k3), math.log(max(sum_k3.size, 1))
    if not spread > known:
        return ()
    found = f"2·KL of a sequence is {spread:.3g}, more than ln N = {known:.3g}"
    return (f"{found}: the sequences that carry the weight were not sampled, so figures of ρ_seq are too small",)
