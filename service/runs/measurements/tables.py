"""Tables of a mismatch by a condition, or by token id, in the schemas of the API."""

from __future__ import annotations

from foreshock.json_values import finite_or_none
from foreshock.measures.statistics.bucket_sums import BucketTable
from foreshock.measures.statistics.conditions import Condition
from foreshock.measures.statistics.token_ids import TokenIdTable
from foreshock_service.runs.coverage.schemas import CoverageRead
from foreshock_service.runs.measurements.schemas import BucketColumns, BucketsRead, TokenIdColumns, TokenIdsRead


def buckets_read(condition: Condition, table: BucketTable, coverage: CoverageRead) -> BucketsRead:
    """Convert the table by a condition."""
    return BucketsRead(
        by=condition.name,
        meaning=condition.meaning,
        unit=condition.unit,
        edges=[finite_or_none(edge) for edge in table.edges.tolist()],
        columns=BucketColumns.model_validate(table.columns()),
        coverage=coverage,
    )


def token_ids_read(table: TokenIdTable, coverage: CoverageRead) -> TokenIdsRead:
    """Convert the table by token id."""
    floats = ("mean_abs_d", "mean_d", "k3_kl", "k3_sum", "k3_sum_missing")
    return TokenIdsRead(
        coverage=coverage,
        k3_sum_unnamed=finite_or_none(table.k3_sum_unnamed),
        columns=TokenIdColumns(
            token_id=table.token_ids.tolist(),
            tokens=table.tokens.tolist(),
            **{name: [finite_or_none(value) for value in getattr(table, name).tolist()] for name in floats},
        ),
    )
