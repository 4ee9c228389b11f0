"""The Parquet codec of exact divergences: round trip, plain columns, and what it refuses."""

from __future__ import annotations

import io
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foreshock.errors import InvalidRolloutsError
from foreshock.rollouts import decode_exact, encode_exact, encode_scores
from foreshock.rollouts.schema import EXACT_COLUMNS
from foreshock.rollouts.scores import ScoreBatch
from tests.foreshock.rollouts.exact_batches import random_exact

LENGTHS = [3, 0, 5, 2]


def test_divergences_round_trip() -> None:
    exact = random_exact(LENGTHS)
    kl = exact.kl.copy()
    kl[:2] = np.inf, np.nan
    exact = replace(exact, kl=kl)
    data = encode_exact(exact)
    found = decode_exact(data)
    for field in fields(exact):
        left, right = getattr(exact, field.name), getattr(found, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, field.name
            np.testing.assert_array_equal(left, right, err_msg=field.name)
        else:
            assert left == right, field.name
    assert encode_exact(found) == data
    table = pq.read_table(io.BytesIO(data))
    assert table.column_names == [column.name for column in EXACT_COLUMNS]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("kl", -1e-3, "must not be negative"),
        ("reverse_kl", -1.0, "must not be negative"),
        ("tv", 1.5, "between 0 and 1"),
        ("tv", -0.1, "between 0 and 1"),
        ("top1_flip", 2, "0 or 1"),
        ("target_entropy", -0.5, "must not be negative"),
        ("behaviour_log_probs", 0.5, "above 0"),
    ],
)
def test_values_out_of_range_are_refused_with_row_and_column(column: str, value: float, message: str) -> None:
    exact = random_exact(LENGTHS)
    values = getattr(exact, column).copy()
    values[4] = value
    with pytest.raises(InvalidRolloutsError, match=message) as error:
        decode_exact(encode_exact(replace(exact, **{column: values})))
    assert (error.value.row, error.value.column) == (2, column)


def test_lists_of_other_lengths_and_missing_columns_are_refused() -> None:
    table = pq.read_table(io.BytesIO(encode_exact(random_exact(LENGTHS))))
    shorter = pa.array([row[:-1] for row in table.column("tv").to_pylist()], type=table.schema.field("tv").type)
    with pytest.raises(InvalidRolloutsError, match="has 2 values, but `kl` has 3"):
        decode_exact(_written(table.set_column(table.column_names.index("tv"), table.schema.field("tv"), shorter)))
    with pytest.raises(InvalidRolloutsError, match="is missing"):
        decode_exact(_written(table.drop_columns(["tv"])))


def test_fingerprints_of_both_scorers_are_required() -> None:
    table = pq.read_table(io.BytesIO(encode_exact(random_exact(LENGTHS))))
    metadata = {key: value for key, value in table.schema.metadata.items() if b"behaviour" not in key}
    with pytest.raises(InvalidRolloutsError, match=r"foreshock\.fingerprint\.behaviour"):
        decode_exact(_written(table.replace_schema_metadata(metadata)))


def test_scores_and_damaged_files_are_refused() -> None:
    exact = random_exact(LENGTHS)
    scores = ScoreBatch(exact.sample_ids, exact.target_log_probs, exact.offsets, exact.target_fingerprint)
    for data in (encode_scores(scores), encode_exact(exact)[:-9], b"", b"not parquet"):
        with pytest.raises(InvalidRolloutsError):
            decode_exact(data)


def _written(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()
