"""Find where in the network two set-ups of one model depart: distances of their hidden states, layer by layer.

Both set-ups compute the same tokens with the same weights. At each place of the network the state of the compared
scorer, h, is compared with that of the reference, r, by the relative L2 distance ‖h − r‖/‖r‖. The noise floor of a
scorer is its distance from itself in other batches. A layer departs if the interval of its mean lies above those of
both floors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.api.records import NAN, Measured, Record, from_attributes
from foreshock.api.replays import MeanRecord
from foreshock.interval_names import RANGE
from foreshock.measures.estimators.bootstrap import LEAST_CLUSTERS, nonnegative_intervals
from foreshock.measures.estimators.intervals import Interval

Float64 = NDArray[np.float64]

HIGH_QUANTILE = 0.99
EMBEDDINGS, FINAL_NORM = "embeddings", "norm"


class Distance(Record, kw_only=False):
    """The distances of two sets of states h and r at one place."""

    relative_l2: Annotated[MeanRecord, "‖h − r‖/‖r‖"]
    relative_l2_p99: Annotated[Measured, "0.99 quantile of ‖h − r‖/‖r‖ over states"]


class ComparedLayer(Record, kw_only=False):
    """One place: `embeddings`, the output of `layers.N` (from 0), or `norm`, the input of the head."""

    name: str
    distance: Annotated[Distance, "of the compared scorer from the reference"]
    compared_floor: Annotated[Distance, "of the compared scorer in other batches from itself"]
    reference_floor: Annotated[Distance, "of the reference in other batches from itself"]
    departs: Annotated[bool, "the interval of `relative_l2` lies above those of both noise floors"]


class LayerComparison(Record):
    """A comparison of two scorers by layer, from the embeddings to the input of the head."""

    step: int
    pair: Annotated[str, "`compared/reference`"]
    compared: str
    reference: str
    rollouts: Annotated[int, "rollouts with a compared state"]
    groups: Annotated[int, "prompt groups of these rollouts"]
    tokens: Annotated[int, "response tokens of the probe"]
    states: Annotated[int, "compared states, at each place"]
    non_finite: Annotated[int, "states left out: a distance is NaN or infinite"]
    departure: Annotated[str | None, "the first place that departs; null: none does beyond its noise floor"]
    sentence: str
    layers: tuple[ComparedLayer, ...]
    compared_fingerprint: dict[str, Any]
    reference_fingerprint: dict[str, Any]


def departure_of(layers: Sequence[ComparedLayer]) -> str | None:
    """Return the name of the first layer that departs; None if none does."""
    return next((layer.name for layer in layers if layer.departs), None)


def departure_in_words(layers: Sequence[ComparedLayer], compared: str, reference: str, groups: int) -> str:
    """Return what a comparison of two scorers shows, as one sentence with its figures."""
    names = f"{compared} and {reference}"
    if not layers or not all(math.isfinite(layer.distance.relative_l2.high) for layer in layers):
        return f"Where {names} depart cannot be told: an interval needs {LEAST_CLUSTERS} prompt groups, got {groups}."
    layer = next((layer for layer in layers if layer.departs), None)
    if layer is None:
        return f"No layer of {names} departs beyond its noise floor."
    mean = layer.distance.relative_l2
    floor = max(each.relative_l2.high for each in (layer.compared_floor, layer.reference_floor))
    return (
        f"{names} depart first at {layer.name}: the relative L2 distance is {mean.mean:.2g} "
        f"({RANGE} {mean.low:.2g} to {mean.high:.2g}), the noise floor at most {floor:.2g}."
    )


def state_distances(states: ArrayLike, reference: ArrayLike) -> Float64:
    """Return ‖h − r‖/‖r‖ of states h and r, [M, H] each, as an array [M].

    Two zero vectors have the distance 0. A zero reference has an infinite distance from any other state. NaN and
    infinite states give NaN.
    """
    h, r = np.asarray(states, np.float64), np.asarray(reference, np.float64)
    if h.shape != r.shape or h.ndim != 2:
        raise ValueError(f"both sets of states must have one shape [M, H], got {h.shape} and {r.shape}")
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        difference, size = np.linalg.norm(h - r, axis=1), np.linalg.norm(r, axis=1)
        found = np.where(difference == 0.0, 0.0, difference / size)
    found[~np.isfinite(np.linalg.norm(h, axis=1) + size)] = math.nan
    return found


def distances_of(values: Float64, groups: NDArray[np.int64]) -> tuple[Distance, ...]:
    """Return the mean distances at each place, with intervals by prompt group.

    `values` [P, M] are the distances of M states at P places, `groups` [M] the states' prompt groups. States with a
    distance that is not finite are left out at all places.

    If nearly all of a sum is in one group, as in a noise floor of few rounded digits, the bootstrap has no interval;
    the range of the groups' means takes its place, which is wider.
    """
    keep = np.isfinite(values).all(axis=0)
    if not keep.any():
        return (Distance(MeanRecord(mean=NAN, low=NAN, high=NAN), NAN),) * len(values)
    names, of = np.unique(groups[keep], return_inverse=True)
    rows, sizes = values[:, keep], np.bincount(of)
    sums = np.asarray([np.bincount(of, row, names.size) for row in rows], np.float64).T
    return tuple(
        Distance(
            from_attributes(MeanRecord, found if math.isfinite(found.high) else _range_of(found, column / sizes)), high
        )
        for found, column, high in zip(
            nonnegative_intervals(sums, sizes), sums.T, np.quantile(rows, HIGH_QUANTILE, axis=1).tolist(), strict=True
        )
    )


def names_of_places(layers: int) -> tuple[str, ...]:
    """Return the names of the places of a network with this many layers."""
    return (EMBEDDINGS, *(f"layers.{number}" for number in range(layers)), FINAL_NORM)


def compared_layers(
    pair: Float64, compared: Float64, reference: Float64, groups: NDArray[np.int64]
) -> tuple[ComparedLayer, ...]:
    """Return the places with the distance of the pair and the noise floors of both scorers, as in `distances_of`."""
    parts = [distances_of(values, groups) for values in (pair, compared, reference)]
    return tuple(
        compared_layer(name, *distances)
        for name, *distances in zip(names_of_places(pair.shape[0] - 2), *parts, strict=True)
    )


def compared_layer(name: str, distance: Distance, compared_floor: Distance, reference_floor: Distance) -> ComparedLayer:
    """Return a place, which departs if the interval of its distance lies above those of both floors."""
    floors = (compared_floor, reference_floor)
    departs = all(distance.relative_l2.low > floor.relative_l2.high for floor in floors)
    return ComparedLayer(name, distance, compared_floor, reference_floor, departs)


def _range_of(found: Interval, groups: Float64) -> Interval:
    """Return the mean with the range of the groups' means; without bounds if there are too few groups."""
    if groups.size < LEAST_CLUSTERS:
        return found
    return replace(found, low=float(groups.min()), high=float(groups.max()))
