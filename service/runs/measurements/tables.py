"""Tables of a mismatch by a condition, or by token id, as they go over HTTP."""

from __future__ import annotations

import math

from foreshock.measures.statistics.bucket_sums import BucketTable
from foreshock.measures.statistics.conditions import Condition
from foreshock.measures.statistics.token_ids import TokenIdTable
from service.runs.measurements.schemas import BucketColumns, BucketsRead, TokenIdColumns, TokenIdsRead


def buckets_read(condition: Condition, table: BucketTable) -> BucketsRead:
    """The table by a condition."""
    return BucketsRead(
        by=condition.name,
        meaning=condition.meaning,
        unit=condition.unit,
        edges=[_finite(edge) for edge in table.edges.tolist()],
        columns=BucketColumns.model_validate(table.columns()),
    )


def token_ids_read(table: TokenIdTable) -> TokenIdsRead:
    """The table by token id."""
    floats = ("mean_abs_d", "mean_d", "k3_kl", "k3_sum", "k3_sum_missing")
    return TokenIdsRead(
        k3_sum_unnamed=_finite(table.k3_sum_unnamed),
        columns=TokenIdColumns(
            token_id=table.token_ids.tolist(),
            tokens=table.tokens.tolist(),
            **{name: [_finite(value) for value in getattr(table, name).tolist()] for name in floats},
        ),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
