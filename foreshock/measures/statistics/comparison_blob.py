"""The sums of a comparison as a blob: the arrays that it holds, and the checks of a reader."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import StatisticsError
from foreshock.measures.statistics import blob
from foreshock.measures.statistics.bucket_sums import BUCKET_SUMS, BucketSums
from foreshock.measures.statistics.clusters import CLUSTER_COLUMNS, ClusterSums
from foreshock.measures.statistics.comparison_sums import COUNTS, EXTREMES, SUMS, ComparisonSums
from foreshock.measures.statistics.compensated_sums import CompensatedSums, LogWeights
from foreshock.measures.statistics.conditions import CONDITIONS
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID, WEIGHT_GRID
from foreshock.measures.statistics.tails import LARGEST_VALUES, TAIL_LEVELS, TAIL_SUMS
from foreshock.measures.statistics.token_ids import TOKEN_ID_SUMS, TokenIdSums

_KIND = "comparison"
# The entry of COUNTS that holds the number of weights, for each of the three weights.
_WEIGHTED = ("tokens", "turns", "measured_rollouts")


def _layout() -> dict[str, tuple[str, tuple[int | None, ...]]]:
    layout: dict[str, tuple[str, tuple[int | None, ...]]] = {
        "counts": ("<i8", (len(COUNTS),)),
        "sums": ("<f8", (2, len(SUMS))),
        "extremes": ("<f8", (len(EXTREMES),)),
        "weights": ("<f8", (len(_WEIGHTED), 3)),
        "histogram": ("<i8", (2, LOG_RATIO_GRID.size)),
        "tail_counts": ("<i8", (2, len(TAIL_LEVELS))),
        "tail_sums": ("<f8", (2, 2, len(TAIL_LEVELS), len(TAIL_SUMS))),
        "weight_sums": ("<f8", (2, 2, WEIGHT_GRID.size, len(TAIL_SUMS))),
        "largest_d": ("<f8", (None,)),
        "largest_minus_d": ("<f8", (None,)),
        "token_ids": ("<i8", (None,)),
        "token_id_tokens": ("<i8", (None,)),
        "token_id_sums": ("<f8", (2, None, len(TOKEN_ID_SUMS))),
        "token_id_covered": ("<f8", (None,)),
        "token_id_bound": ("<f8", (1,)),
        "group_keys": ("<u8", (None,)),
        "group_tokens": ("<i8", (None,)),
        "group_sums": ("<f8", (2, None, len(CLUSTER_COLUMNS))),
        "single_count": ("<i8", (1,)),
        "single_sums": ("<f8", (2, 1 + 2 * len(CLUSTER_COLUMNS))),
    }
    for name, condition in CONDITIONS.items():
        layout[f"{name}_tokens"] = ("<i8", (condition.size,))
        layout[f"{name}_sums"] = ("<f8", (2, condition.size, len(BUCKET_SUMS)))
        layout[f"{name}_max"] = ("<f8", (condition.size,))
    return layout


_LAYOUT = _layout()


def store_comparison(sums: ComparisonSums) -> bytes:
    """Return the sums as a blob; of the token ids, only the KEPT_TOKEN_IDS with the largest Σ k3."""
    weights = (sums.token_weights, sums.turn_weights, sums.sequence_weights)
    token_ids = sums.token_ids.kept()
    arrays: dict[str, NDArray[Any]] = {
        "counts": sums.counts,
        "sums": sums.sums.to_array(),
        "extremes": sums.extremes,
        "weights": np.stack([of_one.to_array() for of_one in weights]),
        "histogram": sums.histogram,
        "tail_counts": sums.tail_counts,
        "tail_sums": sums.tail_sums.to_array(),
        "weight_sums": sums.weight_sums.to_array(),
        "largest_d": sums.largest_d,
        "largest_minus_d": sums.largest_minus_d,
        "token_ids": token_ids.ids,
        "token_id_tokens": token_ids.tokens,
        "token_id_sums": token_ids.sums.to_array(),
        "token_id_covered": token_ids.covered,
        "token_id_bound": np.array([token_ids.bound]),
        "group_keys": sums.clusters.keys,
        "group_tokens": sums.clusters.tokens,
        "group_sums": sums.clusters.sums.to_array(),
        "single_count": np.array([sums.clusters.single_count], dtype=np.int64),
        "single_sums": sums.clusters.single_sums.to_array(),
    }
    for name, buckets in sums.conditions.items():
        arrays[f"{name}_tokens"] = buckets.tokens
        arrays[f"{name}_sums"] = buckets.sums.to_array()
        arrays[f"{name}_max"] = buckets.max_abs_d
    return blob.pack(_KIND, arrays)


def read_comparison(data: bytes) -> ComparisonSums:
    """Return the sums of `store_comparison`. Raises StatisticsError if the blob is damaged or of another version."""
    arrays = blob.unpack(_KIND, data, _LAYOUT)
    counts = arrays["counts"]
    _check(arrays)
    token_weights, turn_weights, sequence_weights = (
        LogWeights.from_array(int(counts[COUNTS.index(name)]), row)
        for name, row in zip(_WEIGHTED, arrays["weights"], strict=True)
    )
    return ComparisonSums(
        counts=counts,
        sums=CompensatedSums.from_array(arrays["sums"]),
        extremes=arrays["extremes"],
        token_weights=token_weights,
        turn_weights=turn_weights,
        sequence_weights=sequence_weights,
        histogram=arrays["histogram"],
        tail_counts=arrays["tail_counts"],
        tail_sums=CompensatedSums.from_array(arrays["tail_sums"]),
        weight_sums=CompensatedSums.from_array(arrays["weight_sums"]),
        conditions={
            name: BucketSums(
                arrays[f"{name}_tokens"], CompensatedSums.from_array(arrays[f"{name}_sums"]), arrays[f"{name}_max"]
            )
            for name in CONDITIONS
        },
        token_ids=TokenIdSums(
            arrays["token_ids"],
            arrays["token_id_tokens"],
            CompensatedSums.from_array(arrays["token_id_sums"]),
            arrays["token_id_covered"],
            float(arrays["token_id_bound"][0]),
        ),
        largest_d=arrays["largest_d"],
        largest_minus_d=arrays["largest_minus_d"],
        clusters=ClusterSums(
            arrays["group_keys"],
            arrays["group_tokens"],
            CompensatedSums.from_array(arrays["group_sums"]),
            int(arrays["single_count"][0]),
            CompensatedSums.from_array(arrays["single_sums"]),
        ),
    )


def _check(arrays: dict[str, Any]) -> None:
    """Raise StatisticsError if lengths that belong together differ."""
    of_groups = {arrays["group_keys"].size, arrays["group_tokens"].size, arrays["group_sums"].shape[1]}
    names = ("token_ids", "token_id_tokens", "token_id_covered")
    of_token_ids = {arrays["token_id_sums"].shape[1], *(arrays[name].size for name in names)}
    largest = max(arrays["largest_d"].size, arrays["largest_minus_d"].size)
    if (
        len(of_groups) > 1
        or len(of_token_ids) > 1
        or largest > LARGEST_VALUES
        or (np.diff(arrays["token_ids"]) <= 0).any()
        or (arrays["counts"] < 0).any()
    ):
        raise StatisticsError("the blob is damaged: its counts contradict each other")
