"""Find where in the network two set-ups of one model depart: distances of their hidden states, layer by layer.

Both set-ups compute the same tokens with the same weights. At each place of the network the state of the compared
scorer, h, is compared with that of the reference, r: by the relative L2 distance ‖h − r‖/‖r‖ and the cosine distance.
The noise floor of a scorer is its distance from itself in other batches. A layer departs if the interval of its mean
lies above the intervals of both floors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.api.records import parse, to_json
from foreshock.errors import InvalidRolloutsError
from foreshock.interval_names import RANGE
from foreshock.json_values import json_value
from foreshock.measures.estimators.bootstrap import LEAST_CLUSTERS, nonnegative_intervals
from foreshock.measures.estimators.intervals import Interval, sums_of_clusters
from foreshock.measures.inputs import group_names
from foreshock.measures.statistics.clusters import clusters_of

Float64 = NDArray[np.float64]

HIGH_QUANTILE = 0.99
EMBEDDINGS, FINAL_NORM = "embeddings", "norm"
# A comparison is served and sent unchanged: no other fields, only finite numbers.
_SENT: Mapping[str, Any] = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over states with its interval by prompt group (`distances_of`); None: there are too few groups."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _SENT

    mean: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, interval: Interval) -> Mean:
        """Return the interval with None for values that are not finite."""
        return cls(**json_value({"mean": interval.mean, "low": interval.low, "high": interval.high}))

    @property
    def known(self) -> bool:
        """True if there is an interval."""
        return self.low is not None and self.high is not None

    def is_above(self, other: Mean) -> bool:
        """Return True if the interval lies above that of `other`; False if either is unknown."""
        return self.low is not None and other.high is not None and self.low > other.high


@dataclass(frozen=True, slots=True)
class Distance:
    """The distances of two sets of states h and r at one place."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _SENT

    relative_l2: Mean
    """‖h − r‖/‖r‖"""
    relative_l2_p99: float | None
    """0.99 quantile of ‖h − r‖/‖r‖ over states"""
    cosine: Mean
    """1 − cos(h, r)"""


@dataclass(frozen=True, slots=True)
class ComparedLayer:
    """One place of the network: the distance of the two scorers, and the noise floor of each.

    `name` is "embeddings" (the input of the first layer), "layers.N" (the output of layer N, from 0) or "norm" (the
    input of the head).
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _SENT

    name: str
    distance: Distance
    compared_floor: Distance
    reference_floor: Distance

    @property
    def floors(self) -> tuple[Mean, Mean]:
        """The mean relative L2 distances of both noise floors."""
        return self.compared_floor.relative_l2, self.reference_floor.relative_l2

    @property
    def departs(self) -> bool:
        """True if the interval of the relative L2 distance lies above those of both noise floors."""
        return all(self.distance.relative_l2.is_above(floor) for floor in self.floors)

    @property
    def may_depart(self) -> bool:
        """True if the mean is above those of both floors, or a mean is unknown."""
        means = [mean.mean for mean in (self.distance.relative_l2, *self.floors)]
        if any(mean is None for mean in means):
            return True
        found, *floors = (mean for mean in means if mean is not None)
        return found > max(floors)


@dataclass(frozen=True, slots=True)
class Departure:
    """The first layer that departs beyond its noise floor.

    `earliest` is the first layer that may: it differs from `layer` if the intervals of the layers between overlap
    those of their floors though the means do not.
    """

    layer: str
    earliest: str

    @property
    def is_certain(self) -> bool:
        """True if no earlier layer may depart."""
        return self.layer == self.earliest


@dataclass(frozen=True, slots=True)
class LayerComparison:
    """The comparison of two scorers at a step, from the embeddings to the input of the head.

    `states` of the step's `tokens` response tokens were compared, in `rollouts` rollouts of `groups` prompt groups;
    `non_finite` more were left out because a distance is NaN or infinite.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _SENT

    step: int
    compared: str
    reference: str
    rollouts: int
    groups: int
    tokens: int
    states: int
    non_finite: int
    layers: tuple[ComparedLayer, ...]
    compared_fingerprint: dict[str, Any]
    reference_fingerprint: dict[str, Any]

    @property
    def departure(self) -> Departure | None:
        """The first layer that departs; None if none does."""
        first = next((layer for layer in self.layers if layer.departs), None)
        if first is None:
            return None
        earliest = next(layer for layer in self.layers if layer is first or layer.may_depart)
        return Departure(first.name, earliest.name)

    def in_words(self) -> str:
        """Return what the comparison shows, as one sentence with its figures."""
        names = f"{self.compared} and {self.reference}"
        if not self.layers or not all(layer.distance.relative_l2.known for layer in self.layers):
            return (
                f"Where {names} depart cannot be told: an interval needs {LEAST_CLUSTERS} prompt groups, got "
                f"{self.groups}."
            )
        found = self.departure
        if found is None:
            return f"No layer of {names} departs beyond its noise floor."
        layer = next(layer for layer in self.layers if layer.name == found.layer)
        mean, floor = layer.distance.relative_l2, max(floor.high or 0.0 for floor in layer.floors)
        where = f"at {found.layer}" if found.is_certain else f"between {found.earliest} and {found.layer}"
        return (
            f"{names} depart first {where}: at {found.layer} the relative L2 distance is {mean.mean:.2g} "
            f"({RANGE} {mean.low:.2g} to {mean.high:.2g}), the noise floor at most {floor:.2g}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return to_json(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayerComparison:
        """Restore the comparison from `to_dict()`; other values are ignored."""
        return parse(cls, values)


@dataclass(frozen=True, slots=True, eq=False)
class DistanceSums:
    """Sums of the distances of states over each of N rollouts, at P places.

    `states` [N] is the number of states, `relative_l2` and `cosine` [N, P] the sums of their distances;
    `relative_l2_p99` [P] is the quantile over all of them. `non_finite` states are in none of these.
    """

    states: NDArray[np.int64]
    relative_l2: Float64
    cosine: Float64
    relative_l2_p99: Float64
    non_finite: int

    @classmethod
    def of_states(cls, relative_l2: Float64, cosine: Float64, rollouts: NDArray[np.int64], count: int) -> DistanceSums:
        """Return the sums of distances [P, M] at M states; `rollouts` [M] is the rollout of each, 0 … count − 1."""
        keep = np.isfinite(relative_l2).all(axis=0) & np.isfinite(cosine).all(axis=0)
        of, places = rollouts[keep], relative_l2.shape[0]

        def sums(values: Float64) -> Float64:
            columns = [np.bincount(of, weights=row[keep], minlength=count) for row in values]
            return np.stack(columns, axis=1) if places else np.zeros((count, 0))

        high = np.quantile(relative_l2[:, keep], HIGH_QUANTILE, axis=1) if keep.any() else np.full(places, math.nan)
        return cls(
            states=np.bincount(of, minlength=count).astype(np.int64),
            relative_l2=sums(relative_l2),
            cosine=sums(cosine),
            relative_l2_p99=high,
            non_finite=int(np.count_nonzero(~keep)),
        )


def state_distances(states: ArrayLike, reference: ArrayLike) -> tuple[Float64, Float64]:
    """Return ‖h − r‖/‖r‖ and 1 − cos(h, r) of states h and r, [M, H] each, as two arrays [M].

    Two zero vectors have the distances 0. A zero reference has an infinite relative distance from any other state, and
    a zero vector the cosine distance 1 from any other. NaN and infinite states give NaN.
    """
    h, r = np.asarray(states, np.float64), np.asarray(reference, np.float64)
    if h.shape != r.shape or h.ndim != 2:
        raise ValueError(f"both sets of states must have one shape [M, H], got {h.shape} and {r.shape}")
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        size_h, size_r = np.linalg.norm(h, axis=1), np.linalg.norm(r, axis=1)
        difference = np.linalg.norm(h - r, axis=1)
        relative = np.where(difference == 0.0, 0.0, difference / size_r)
        # (‖h − r‖² − (‖h‖ − ‖r‖)²) / (2·‖h‖·‖r‖) keeps the digits that 1 − cos loses for states that are nearly equal.
        apart = (difference - (size_h - size_r)) * (difference + (size_h - size_r))
        cosine = np.where(difference == 0.0, 0.0, np.clip(apart / (2.0 * size_h * size_r), 0.0, 2.0))
        cosine = np.where(np.minimum(size_h, size_r) == 0.0, np.where(difference == 0.0, 0.0, 1.0), cosine)
    bad = ~np.isfinite(size_h + size_r)
    relative[bad], cosine[bad] = math.nan, math.nan
    return relative, cosine


def distances_of(sums: DistanceSums, group_ids: Iterable[object] | None = None) -> tuple[Distance, ...]:
    """Return the mean distances at each place, with intervals by prompt group (a lone rollout is its own group).

    If nearly all of a sum is in one group, as in a noise floor of few rounded digits, the bootstrap has no interval;
    the range of the groups' means takes its place, which is wider. Raises InvalidRolloutsError unless there are as many
    group ids as rollouts.
    """
    clusters = clusters_of(group_names(group_ids, sums.states.size))
    both = np.concatenate([sums.relative_l2, sums.cosine], axis=1)
    of_groups, sizes = sums_of_clusters(both, sums.states, clusters)
    means = [
        Mean.of(found if math.isfinite(found.high) else _range_of(found, column / sizes))
        for found, column in zip(nonnegative_intervals(both, sums.states, clusters), of_groups.T, strict=True)
    ]
    places = sums.relative_l2_p99.size
    high: list[float | None] = json_value(sums.relative_l2_p99.tolist())
    return tuple(Distance(means[place], high[place], means[places + place]) for place in range(places))


def count_groups(sums: DistanceSums, group_ids: Iterable[object] | None = None) -> int:
    """Return the number of prompt groups that have a state."""
    return int(np.unique(clusters_of(group_names(group_ids, sums.states.size))[sums.states > 0]).size)


def names_of_places(layers: int) -> tuple[str, ...]:
    """Return the names of the places of a network with this many layers."""
    return (EMBEDDINGS, *(f"layers.{number}" for number in range(layers)), FINAL_NORM)


def compared_layers(
    pair: DistanceSums, compared: DistanceSums, reference: DistanceSums, group_ids: Sequence[object] | None = None
) -> tuple[ComparedLayer, ...]:
    """Return the places with the distance of the pair and the noise floors of both scorers.

    Raises InvalidRolloutsError if the three have different places or rollouts.
    """
    shapes = {sums.relative_l2.shape for sums in (pair, compared, reference)}
    if len(shapes) != 1:
        raise InvalidRolloutsError(f"distances of one shape [rollouts, places] are needed, got {sorted(shapes)}")
    parts = [distances_of(sums, group_ids) for sums in (pair, compared, reference)]
    names = names_of_places(pair.relative_l2.shape[1] - 2)
    return tuple(ComparedLayer(name, *distances) for name, *distances in zip(names, *parts, strict=True))


def _range_of(found: Interval, groups: Float64) -> Interval:
    """Return the mean with the range of the groups' means; without bounds if there are too few groups."""
    if groups.size < LEAST_CLUSTERS:
        return found
    return replace(found, low=float(groups.min()), high=float(groups.max()))
