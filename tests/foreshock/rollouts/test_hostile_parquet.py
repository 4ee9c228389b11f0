"""Damaged and hostile bodies raise RolloutsError, and never crash the process."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foreshock.errors import InvalidRolloutsError, RolloutsError
from foreshock.rollouts import decode_exact, decode_rollouts, encode_exact, encode_rollouts, encode_scores
from foreshock.rollouts.schema import EXACT_COLUMNS
from foreshock.rollouts.scores import ScoreBatch
from tests.foreshock.batches import assert_equal_fields, random_batch
from tests.foreshock.rollouts.exact_batches import random_exact


@pytest.mark.parametrize(
    "data",
    [b"", b"PAR1", b"PAR1PAR1", b"PAR1" + b"\0" * 8 + b"PAR1", b"PAR1\xff\xff\xff\xffPAR1", b"x" * 100, b"PK\x03\x04"],
)
def test_body_that_is_not_parquet_is_refused(data: bytes) -> None:
    with pytest.raises(RolloutsError):
        decode_rollouts(data)


def test_truncated_body_is_refused() -> None:
    data = encode_rollouts(random_batch(0, rollouts=3, longest=4))
    for length in range(0, len(data), 101):
        with pytest.raises(InvalidRolloutsError):
            decode_rollouts(data[:length])


FUZZ = """
import random, sys
from foreshock.errors import RolloutsError
from foreshock.rollouts import decode_rollouts

data = bytes.fromhex(sys.stdin.read())
generator = random.Random(7)
refused = 0
for _ in range(800):
    damaged = bytearray(data)
    for _ in range(generator.choice([1, 1, 2, 4])):
        position = generator.randrange(len(damaged))
        damaged[position] = generator.choice([0, 255, damaged[position] ^ (1 << generator.randrange(8))])
    try:
        decode_rollouts(bytes(damaged))
    except RolloutsError:
        refused += 1
print(refused)
"""


@pytest.mark.skipif(
    tuple(int(part) for part in pa.__version__.split(".")[:3]) <= (23, 0, 0),
    reason="older pyarrow crashes on pages that are damaged inside; the service demands a newer one",
)
def test_damaged_body_does_not_crash_process() -> None:
    """The test runs in a subprocess, because Arrow can crash the process on a damaged footer."""
    data = encode_rollouts(random_batch(0, rollouts=3, longest=4))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FUZZ)], input=data.hex(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 250


@pytest.mark.parametrize(
    "options",
    [
        {"data_page_version": "2.0"},
        {"data_page_size": 64, "write_batch_size": 8},
        {"compression": "none"},
        {"compression": "gzip", "use_dictionary": False},
        {"compression": {"sample_id": "snappy", "response_token_ids": "brotli"}},
        {"write_page_checksum": True, "write_page_index": True, "write_statistics": True},
        {"dictionary_pagesize_limit": 16},
        {"version": "1.0"},
        {"row_group_size": 1},
    ],
)
def test_files_of_other_writers_are_accepted(options: dict[str, Any]) -> None:
    batch = random_batch(0, rollouts=40, longest=30)
    table = pq.read_table(io.BytesIO(encode_rollouts(batch)))
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    again = decode_rollouts(sink.getvalue())
    assert encode_rollouts(again) == encode_rollouts(batch)


LENGTHS = [3, 0, 5, 2]


def test_divergences_round_trip() -> None:
    exact = random_exact(LENGTHS)
    kl = exact.kl.copy()
    kl[:2] = np.inf, np.nan
    exact = replace(exact, kl=kl)
    data = encode_exact(exact)
    found = decode_exact(data)
    assert_equal_fields(found, exact)
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
