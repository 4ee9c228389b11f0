"""Answers: entity tags and If-None-Match; compressed only by a coding that the client accepts."""

import csv
import gzip
import io
import json
import math
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from foreshock_service.platform import columnar
from foreshock_service.platform.compression import compressed, etag_of, matches, names_version
from foreshock_service.platform.request_guards import PARQUET_MEDIA_TYPE


def test_tags_are_equal_only_for_equal_versions_and_bodies() -> None:
    assert etag_of("1-7-3", b"body") == etag_of("1-7-3", b"body")
    assert len({etag_of("1-23", b""), etag_of("12-3", b""), etag_of("1-2-3", b""), etag_of("1-23", b"x")}) == 4


def test_header_matches_the_tags_that_it_names() -> None:
    for header in ('"1-7-3"', 'W/"1-7-3"', '"x", "1-7-3"', "*", '"x",W/"1-7-3"'):
        assert matches(header, '"1-7-3"'), header
    for other in (None, "", '"1-7-4"', "1-7-3", '"x", "y"', 'W/"x"'):
        assert not matches(other, '"1-7-3"'), other


def test_tag_names_its_version_whatever_the_body() -> None:
    for header in (etag_of("1-7-3", b"a"), f'"x", W/{etag_of("1-7-3", b"b")}', "*"):
        assert names_version(header, "1-7-3"), header
    for other in (None, "", etag_of("1-7-31", b"a"), etag_of("11-7-3", b"a"), '"x"', '".1-7-3"'):
        assert not names_version(other, "1-7-3"), other


BODY = b"[0.125, 0.25]" * 100


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip, deflate, br, zstd", "gzip"),
        ("GZIP ; q=0.5", "gzip"),
        ("zstd", None),
        ("identity", None),
        ("", None),
        (None, None),
    ],
)
def test_body_has_a_coding_that_is_accepted(accepted: str | None, coding: str | None) -> None:
    body, headers = compressed(BODY, accepted)
    assert headers == ({"Content-Encoding": coding} if coding else {})
    assert (gzip.decompress(body) if coding else body) == BODY


def test_small_body_is_not_compressed() -> None:
    assert compressed(b"[]", "gzip") == (b"[]", {})


TABLE = columnar.ColumnTable(
    {
        "step": np.array([1, 2, 2**53 + 1]),
        "name": np.array(["größe", 'a "quoted", name', "größe"], dtype=np.object_),
        "sample": np.array([True, False, False]),
        "value": np.array([0.1, np.nan, np.inf]),
    }
)
ROWS: dict[str, list[Any]] = {
    "step": [1, 2, 2**53 + 1],
    "name": ["größe", 'a "quoted", name', "größe"],
    "sample": [True, False, False],
    "value": [0.1, None, None],
}


def test_values_that_are_not_finite_are_null_or_empty() -> None:
    document = json.loads(columnar.render(TABLE, columnar.JSON_MEDIA_TYPE, {"note": ["kept"]}))
    assert document == {"columns": ROWS, "note": ["kept"]}
    assert pq.read_table(io.BytesIO(columnar.render(TABLE, PARQUET_MEDIA_TYPE))).to_pydict() == ROWS
    rows = list(csv.DictReader(io.StringIO(columnar.render(TABLE, columnar.CSV_MEDIA_TYPE).decode())))
    assert [row["name"] for row in rows] == ROWS["name"]
    assert [row["value"] for row in rows] == ["0.1", "", ""]


@pytest.mark.parametrize("media_type", [columnar.JSON_MEDIA_TYPE, columnar.CSV_MEDIA_TYPE, PARQUET_MEDIA_TYPE])
def test_a_table_without_rows_has_its_columns(media_type: str) -> None:
    empty = TABLE.rows(np.empty(0, np.int64))
    assert columnar.keep_extremes(empty, ("name",), ("value",), 2).num_rows == 0
    body = columnar.render(empty, media_type)
    if media_type == columnar.JSON_MEDIA_TYPE:
        assert json.loads(body) == {"columns": {name: [] for name in ROWS}}
    elif media_type == columnar.CSV_MEDIA_TYPE:
        assert next(csv.reader(io.StringIO(body.decode()))) == list(ROWS)
    else:
        assert pq.read_table(io.BytesIO(body)).column_names == list(ROWS)


def test_rows_are_sorted_by_the_names_of_labels() -> None:
    ordered = TABLE.sorted_by("name", "step")
    assert ordered.strings("name") == sorted(ROWS["name"])
    assert ordered.array("step").tolist() == [2, 1, 2**53 + 1]
    assert ordered.groups("name") == [(0, 1), (1, 3)]


VALUES = st.one_of(st.floats(-1e9, 1e9), st.sampled_from([math.nan, math.inf, -math.inf]))


def finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    kept: NDArray[np.float64] = values[np.isfinite(values)]
    return kept


@given(st.lists(st.tuples(VALUES, st.floats(-1, 1)), min_size=1, max_size=200), st.integers(2, 60))
def test_ends_and_extremes_are_kept(rows: list[tuple[float, float]], most: int) -> None:
    values = np.array(rows, dtype=np.float64)
    columns = {"step": np.arange(len(rows)), "curve": np.zeros(len(rows)), "a": values[:, 0], "b": values[:, 1]}
    kept = columnar.keep_extremes(columnar.ColumnTable(columns), ("curve",), ("a", "b"), most)
    steps = kept.array("step").tolist()
    assert len(steps) <= max(most, 6)
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, len(rows) - 1)
    for name in ("a", "b"):
        whole, rest = finite(columnar.ColumnTable(columns).array(name)), finite(kept.array(name))
        if whole.size:
            assert (rest.min(), rest.max()) == (whole.min(), whole.max())


def test_each_curve_is_sampled_alone() -> None:
    curve = np.repeat(np.array(["entropy", "loss"], dtype=np.object_), 100)
    value = np.zeros(200)
    value[[33, 166]] = 5.0
    kept = columnar.keep_extremes(
        columnar.ColumnTable({"step": np.arange(200), "name": curve, "value": value}), ("name",), ("value",), 8
    )
    assert {0, 33, 99, 100, 166, 199} <= set(kept.array("step").tolist())
    assert kept.num_rows <= 16
    assert set(kept.strings("name")) == {"loss", "entropy"}
