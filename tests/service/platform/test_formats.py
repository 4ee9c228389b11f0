"""The three formats hold the same values."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from foreshock_service.platform.columnar import CSV_MEDIA_TYPE, JSON_MEDIA_TYPE, ColumnTable, Labels, render
from foreshock_service.platform.request_guards import PARQUET_MEDIA_TYPE

TABLE = ColumnTable(
    {
        "step": np.array([1, 2, 2**53 + 1]),
        "name": Labels(np.array([1, 0, 1], dtype=np.int32), ('a "quoted", name', "größe")),
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


def test_json_has_null_for_values_that_are_not_finite() -> None:
    document = json.loads(render(TABLE, JSON_MEDIA_TYPE, {"note": ["kept"]}))
    assert document == {"columns": ROWS, "note": ["kept"]}
    assert json.loads(render(TABLE, JSON_MEDIA_TYPE)) == {"columns": ROWS}


def test_parquet_has_the_same_values() -> None:
    assert pq.read_table(io.BytesIO(render(TABLE, PARQUET_MEDIA_TYPE))).to_pydict() == ROWS


def test_csv_has_empty_cells_for_missing_values() -> None:
    rows = list(csv.DictReader(io.StringIO(render(TABLE, CSV_MEDIA_TYPE).decode())))
    assert [row["name"] for row in rows] == ROWS["name"]
    assert [row["value"] for row in rows] == ["0.1", "", ""]


@pytest.mark.parametrize("media_type", [JSON_MEDIA_TYPE, CSV_MEDIA_TYPE, PARQUET_MEDIA_TYPE])
def test_a_table_without_rows_has_its_columns(media_type: str) -> None:
    body = render(TABLE.rows(np.empty(0, np.int64)), media_type)
    if media_type == JSON_MEDIA_TYPE:
        assert json.loads(body) == {"columns": {name: [] for name in ROWS}}
    elif media_type == CSV_MEDIA_TYPE:
        assert next(csv.reader(io.StringIO(body.decode()))) == list(ROWS)
    else:
        assert pq.read_table(io.BytesIO(body)).column_names == list(ROWS)


def test_rows_are_sorted_by_the_names_of_labels() -> None:
    ordered = TABLE.sorted_by("name", "step")
    assert ordered.strings("name") == sorted(ROWS["name"])
    assert ordered.array("step").tolist() == [2, 1, 2**53 + 1]
    assert ordered.groups("name") == [(0, 1), (1, 3)]
