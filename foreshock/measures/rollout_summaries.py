"""One row per rollout: its sums of d and its metadata.

The rows are kept beside the statistics for results that a fold of sums cannot give: sequence-level measures at any
threshold, the rollouts that a correction would drop, and intervals clustered by rollout or group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from foreshock.errors import StatisticsError
from foreshock.measures.estimators.bootstrap import nonnegative_intervals
from foreshock.measures.inputs import generated_means, truncated_rollouts, turns_of_rollouts
from foreshock.measures.registry import BOOTSTRAPPED
from foreshock.measures.statistics.blob import STATISTICS_VERSION
from foreshock.measures.statistics.rollout_sums import RolloutSums
from foreshock.rollouts.batch import RolloutBatch

SUMMARY_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("group_id", pa.string()),
        ("length", pa.int64()),  # model-generated tokens
        ("n_tokens", pa.int64()),  # of those, with two finite log-probs: the tokens that are summed
        ("sum_d", pa.float64()),
        ("sum_abs_d", pa.float64()),
        ("sum_ratio_minus_one", pa.float64()),  # Σ(ρ − 1)
        ("sum_k3", pa.float64()),
        ("sum_chi2", pa.float64()),  # Σ(ρ − 1)²
        ("sum_tv", pa.float64()),  # Σ(1 − ρ)⁺
        ("sum_abs_probability_difference", pa.float64()),
        ("min_d", pa.float64()),
        ("max_d", pa.float64()),
        ("reward", pa.float32()),
        ("advantage", pa.float64()),  # the mean over generated tokens if logged per token
        ("turns", pa.int64()),
        ("finish_reason", pa.string()),
        ("truncated", pa.bool_()),
        ("lag", pa.float64()),  # the mean over generated tokens
    ],
    metadata={"statistics_version": str(STATISTICS_VERSION)},
)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutSummaries:
    """A table of SUMMARY_SCHEMA; null if a value was not logged. d = log target − log behaviour, in nats."""

    table: pa.Table

    @property
    def num_rollouts(self) -> int:
        """The number of rows."""
        return int(self.table.num_rows)

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of numbers as an array, [N]; NaN for null."""
        values: NDArray[Any] = self.table.column(name).to_numpy()
        return values

    @classmethod
    def of(cls, batch: RolloutBatch, sums: RolloutSums, lag: NDArray[np.integer] | None = None) -> RolloutSummaries:
        """Return the rows of a batch from its sums by `sum_rollouts`; `lag` [T] is the lag of its tokens, if known."""
        measured = sums.tokens > 0
        truncated, known = truncated_rollouts(batch)
        turns = None
        if batch.turn is not None:
            # The pass counted the turns only if it measured every token that the model sampled.
            counted = np.array_equal(sums.tokens, sums.generated)
            turns = sums.turns if counted else turns_of_rollouts(batch)
        columns: dict[str, Any] = {
            "sample_id": batch.sample_ids,
            "group_id": batch.group_ids,
            "length": sums.generated,
            "n_tokens": sums.tokens,
            "sum_d": sums.column("d"),
            "sum_abs_d": sums.column("abs_d"),
            "sum_ratio_minus_one": sums.column("ratio_minus_one"),
            "sum_k3": sums.column("k3_kl"),
            "sum_chi2": sums.column("chi2_token"),
            "sum_tv": sums.column("tv_token"),
            "sum_abs_probability_difference": sums.column("abs_probability_difference"),
            "min_d": pa.array(sums.min_d, mask=~measured),
            "max_d": pa.array(sums.max_d, mask=~measured),
            "reward": None if batch.reward is None else pa.array(batch.reward, mask=np.isnan(batch.reward)),
            "advantage": _optional(_advantages(batch)),
            "turns": turns,
            "finish_reason": batch.finish_reasons,
            "truncated": pa.array(truncated, mask=~known),
            "lag": None if lag is None else _optional(generated_means(batch, lag)),
        }
        arrays = []
        for field in SUMMARY_SCHEMA:
            values = columns[field.name]
            if values is None:
                values = pa.nulls(batch.num_rollouts, field.type)
            elif not isinstance(values, pa.Array):
                values = pa.array(values, type=field.type)
            arrays.append(values.cast(field.type))
        return cls(pa.Table.from_arrays(arrays, schema=SUMMARY_SCHEMA))

    @staticmethod
    def concat(parts: Iterable[RolloutSummaries]) -> RolloutSummaries:
        """Return the rows of all parts, in the order given."""
        tables = [part.table for part in parts]
        return RolloutSummaries(pa.concat_tables(tables) if tables else SUMMARY_SCHEMA.empty_table())

    def largest_abs_d(self) -> NDArray[np.float64]:
        """Return the largest |d| of each rollout's tokens, [N]; NaN without a measured token."""
        return np.maximum(-self.column("min_d").astype(np.float64), self.column("max_d").astype(np.float64))

    def whole(self) -> NDArray[np.bool_]:
        """Return whether each rollout is whole, [N]: it has tokens, and each of them has two finite log-probs.

        Only whole rollouts have a ratio of their sequence: Σ d over a part of the tokens is not its logarithm.
        """
        tokens = self.column("n_tokens")
        whole: NDArray[np.bool_] = (tokens > 0) & (tokens == self.column("length"))
        return whole

    def bootstrap_measures(self) -> dict[str, float]:
        """Return the registry's bootstrap intervals by prompt group, by column; they need one row per rollout.

        Rows are sorted first, so that the same rollouts give the same intervals bit for bit in any order.
        """
        of_names = self.ranks("sample_id")
        clusters = self.clusters(of_names)
        order = np.lexsort((of_names, clusters))
        sums = np.stack([self.column(name)[order] for name in ("sum_k3", "sum_chi2", "sum_tv")], axis=1)
        intervals = nonnegative_intervals(sums, self.column("n_tokens")[order], clusters[order])
        measures = {}
        for name, interval in zip(BOOTSTRAPPED, intervals, strict=True):
            measures[f"{name}_bootstrap_low"], measures[f"{name}_bootstrap_high"] = interval.low, interval.high
        return measures

    def clusters(self, of_names: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Return a number for each rollout's prompt group, [N], in order of ids; without a group, its own number.

        `of_names` are the ranks by sample id, if known.
        """
        rows, groups = self.num_rollouts, self.table.column("group_id")
        if groups.null_count == 0:
            return self.ranks("group_id")
        # Sample ids are unique in a shard, but may repeat over shards or ranks: then the largest rank is below N.
        if of_names is None or of_names.max(initial=0) < rows:
            of_names = self.ranks("sample_id", "first")
        if groups.null_count == rows:
            return rows + of_names
        grouped = np.asarray(pc.is_valid(groups), dtype=np.bool_)
        return np.where(grouped, self.ranks("group_id"), rows + of_names)

    def ranks(self, name: str, ties: str = "dense") -> NDArray[np.int64]:
        """Return the rank of each row by a column, [N]; equal values share one, or with "first" rank in row order."""
        return np.asarray(pc.rank(self.table.column(name).combine_chunks(), tiebreaker=ties), dtype=np.int64)

    def to_bytes(self) -> bytes:
        """Return the table as an Arrow IPC file, compressed with zstd."""
        sink = pa.BufferOutputStream()
        # A summary is small: handing each column to another thread takes longer than compressing it.
        options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
        with pa.ipc.new_file(sink, SUMMARY_SCHEMA, options=options) as writer:
            writer.write_table(self.table)
        data: bytes = sink.getvalue().to_pybytes()
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> RolloutSummaries:
        """Restore the table from `to_bytes()`. Raises StatisticsError if damaged or of another version."""
        try:
            table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise StatisticsError(f"the rollout summaries are damaged: {error}") from error
        version = (table.schema.metadata or {}).get(b"statistics_version", b"none").decode(errors="replace")
        if version != str(STATISTICS_VERSION):
            raise StatisticsError(
                f"rollout summaries must be of version {STATISTICS_VERSION}, got {version!r}: "
                "measure them again from their tokens (`foreshock remeasure`)"
            )
        if not table.schema.equals(SUMMARY_SCHEMA):
            raise StatisticsError("the rollout summaries are damaged: their columns are not those of their version")
        return cls(table)


def _optional(values: NDArray[Any]) -> pa.Array:
    return pa.array(values, mask=np.isnan(values))


def _advantages(batch: RolloutBatch) -> NDArray[np.float64]:
    if batch.advantage is None:
        return np.full(batch.num_rollouts, np.nan)
    if not batch.advantage_per_token:
        return batch.advantage.astype(np.float64)
    return generated_means(batch, batch.advantage)
