"""Reports to the notary as Parquet: a row for each piece of a tensor; what else a holder says is metadata.

A mixture of experts has tens of thousands of tensors, which are megabytes of JSON. A holder is `trainer`,
`variant:NAME` or `engine:NAME`. What it says is a mapping with `tensors` (the pieces of each tensor: dtype, digest,
rows, words of a row, first row, first word, rank), `canary` and `others_as_announced`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from foreshock.errors import InvalidRolloutsError, WeightsError
from foreshock.parsing import parse_json
from foreshock.rollouts.parquet_files import arrow_errors, open_checked, read_all
from foreshock.rollouts.schema import ColumnSpec, DecodeLimits

MOST_PIECES = 250_000
"""Pieces of one report: 100,000 whole tensors, or 30,000 of eight tensor-parallel ranks."""

METADATA_KEY = b"foreshock.weights"

_LIMITS = DecodeLimits(
    max_rollouts=MOST_PIECES, max_uncompressed_bytes=256 << 20, max_row_groups=256, max_metadata_bytes=4 << 20
)
_COLUMNS = (
    ColumnSpec("holder", "string", "rollout", "trainer, variant:NAME or engine:NAME", required=True),
    ColumnSpec("tensor", "string", "rollout", "its name in the checkpoint", required=True),
    ColumnSpec("dtype", "string", "rollout", "such as bfloat16", required=True),
    ColumnSpec("digest", "uint64", "rollout", "of the piece, as if it were the whole", required=True),
    ColumnSpec("rows", "int64", "rollout", "rows of the piece", required=True),
    ColumnSpec("words", "int64", "rollout", "32-bit words of a row", required=True),
    ColumnSpec("first_row", "int64", "rollout", "its place in the tensor", required=True),
    ColumnSpec("first_word", "int64", "rollout", "its place in a row", required=True),
    ColumnSpec("rank", "int64", "rollout", "the process that holds it", required=True),
)
_NOTHING = ("", "", "", 0, 0, 0, 0, 0, 0)
"""The row of a report without tensors: of canaries alone."""


def encode_report(holders: Mapping[str, Mapping[str, Any]], engines_in_all: int | None) -> bytes:
    """Return the report of these holders. Raises WeightsError if it has more than MOST_PIECES pieces."""
    rows = [
        (holder, name, *piece)
        for holder, said in holders.items()
        for name, pieces in said["tensors"].items()
        for piece in pieces
    ] or [_NOTHING]
    if len(rows) > MOST_PIECES:
        raise WeightsError(
            f"the report has {len(rows):,} pieces of tensors, more than {MOST_PIECES:,}: report the engines in several "
            "calls of log_weights"
        )
    others = {holder: {name: said[name] for name in said if name != "tensors"} for holder, said in holders.items()}
    metadata = json.dumps({"engines_in_all": engines_in_all, "holders": others}, allow_nan=False)
    arrays = [
        pa.array(values, getattr(pa, column.value_type)())
        for column, values in zip(_COLUMNS, zip(*rows, strict=True), strict=True)
    ]
    table = pa.Table.from_arrays(arrays, names=[column.name for column in _COLUMNS])
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata({METADATA_KEY: metadata.encode()}),
        sink,
        compression="zstd",
        row_group_size=16_384,
        write_statistics=False,
        write_page_checksum=True,
    )
    return bytes(sink.getvalue())


def read_report(source: pa.NativeFile) -> tuple[dict[str, dict[str, Any]], int | None]:
    """Return what each holder says, with digests as 16 hexadecimal digits, and the number of engines in all.

    Values are of these types, and not checked beyond. Call it in a process with a memory limit. Raises
    InvalidRolloutsError or LimitExceededError.
    """
    with arrow_errors():
        reader = read_all(open_checked(source, _COLUMNS, _LIMITS), _LIMITS)
        columns = [
            reader.strings(each) if each.is_string else reader.numbers(each, null_value=None).tolist()
            for each in _COLUMNS
        ]
    try:
        metadata = parse_json(reader.metadata.get(METADATA_KEY, b""))
        holders = {holder: {**said, "tensors": {}} for holder, said in metadata["holders"].items()}
        for holder, name, dtype, digest, *place in zip(*columns, strict=True):
            if (holder, name) != ("", ""):
                holders[holder]["tensors"].setdefault(name, []).append([dtype, f"{digest:016x}", *place])
        return holders, metadata["engines_in_all"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        key = METADATA_KEY.decode()
        raise InvalidRolloutsError(f"the metadata {key!r} must name each holder of the table: {error!r}") from error
