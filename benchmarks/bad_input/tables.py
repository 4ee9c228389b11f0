"""Hostile Parquet files: valid files with damaged bytes, and valid Parquet that is not a table of rollouts."""

from __future__ import annotations

import contextlib
import io
import random
import struct
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_FOOTER = 8
_CODECS = ("none", "snappy", "gzip", "brotli", "lz4", "zstd")


def damaged(body: bytes, other: bytes, source: random.Random) -> bytes:
    """Return the body after one to three changes of its bytes, its footer or its length."""
    changed = bytearray(body)
    for _ in range(source.randint(1, 3)):
        changed = bytearray(source.choice(_DAMAGES)(changed, other, source))
    return bytes(changed)


def hostile_table(body: bytes, source: random.Random) -> bytes:
    """Return a Parquet file with other columns, types, counts or values than those of the valid `body`."""
    table = pq.read_table(io.BytesIO(body))
    for _ in range(source.randint(1, 2)):
        # A change may not fit an already changed table, for example one without columns or with two of one name.
        with contextlib.suppress(pa.ArrowException, LookupError, ValueError):
            table = source.choice(_CHANGES)(table, source)
    return _written(
        table,
        compression=source.choice(_CODECS),
        use_dictionary=source.random() < 0.5,
        row_group_size=source.choice([None, 1, 2]),
        data_page_version=source.choice(["1.0", "2.0"]),
    )


def bomb(source: random.Random) -> bytes:
    """Return a small file that decodes to, or claims, gigabytes: repeated dictionaries, runs of one value, counts."""
    return source.choice((_dictionary_bomb, _run_bomb, _many_row_groups, _many_columns, _deep_nesting))(source)


def _flip(body: bytearray, other: bytes, source: random.Random) -> bytearray:
    for _ in range(source.randint(1, 8)):
        if body:
            body[source.randrange(len(body))] ^= 1 << source.randrange(8)
    return body


def _flip_footer(body: bytearray, other: bytes, source: random.Random) -> bytearray:
    length = _footer_length(body)
    start = max(0, len(body) - _FOOTER - length)
    for _ in range(source.randint(1, 6)):
        if len(body) - _FOOTER > start:
            body[source.randrange(start, len(body) - _FOOTER)] = source.randrange(256)
    return body


def _footer_size(body: bytearray, other: bytes, source: random.Random) -> bytearray:
    if len(body) < _FOOTER:
        return body
    size = source.choice([0, 1, 2**31 - 1, 2**32 - 1, len(body), len(body) * 2, source.randrange(2**32)])
    body[-8:-4] = struct.pack("<I", size)
    return body


def _truncate(body: bytearray, other: bytes, source: random.Random) -> bytearray:
    return body[: source.randint(0, len(body))]


def _truncate_middle(body: bytearray, other: bytes, source: random.Random) -> bytearray:
    start = source.randint(0, len(body))
    return body[:start] + body[start + source.randint(1, 200) :]


def _insert(body: bytearray, other: bytes, source: random.Random) -> bytearray:
    at = source.randint(0, len(body))
    return body[:at] + bytes(source.randbytes(source.randint(1, 64))) + body[at:]


def _splice(body: bytearray, other: bytes, source: random.Random) -> bytearray:
    return body[: source.randint(0, len(body))] + bytearray(other[source.randint(0, len(other)) :])


def _fill(body: bytearray, other: bytes, source: random.Random) -> bytearray:
    at = source.randint(0, len(body))
    end = min(len(body), at + source.randint(1, 64))
    body[at:end] = bytes([source.choice((0, 0xFF, 0x7F, 0x80))]) * (end - at)
    return body


def _footer_length(body: bytearray) -> int:
    size = int(struct.unpack("<I", body[-8:-4])[0]) if len(body) >= _FOOTER else 0
    return min(size, len(body))


_Damage = Callable[[bytearray, bytes, random.Random], bytearray]
_DAMAGES: tuple[_Damage, ...] = (
    _flip, _flip_footer, _flip_footer, _footer_size, _truncate, _truncate_middle, _insert, _splice, _fill,
)  # fmt: skip


def _other_type(table: pa.Table, source: random.Random) -> pa.Table:
    index = source.randrange(table.num_columns)
    return table.set_column(index, table.column_names[index], _column(table.num_rows, source))


def _without(table: pa.Table, source: random.Random) -> pa.Table:
    return table.remove_column(source.randrange(table.num_columns))


def _extra(table: pa.Table, source: random.Random) -> pa.Table:
    name = source.choice(["", "x" * 1000, "sample_id", "prompt_token_ids", "log_probs", "\x00", "../../etc/passwd"])
    return table.append_column(name, _column(table.num_rows, source))


def _values(table: pa.Table, source: random.Random) -> pa.Table:
    """Put a NaN, an infinity, a positive log-prob or a huge number into a column of floats or ints."""
    index = source.randrange(table.num_columns)
    column = table.column(index).combine_chunks()
    if not pa.types.is_list(column.type) or not len(column.values):
        return table
    values = column.values.to_numpy(zero_copy_only=False).copy()
    if values.dtype.kind == "f":
        hostile: list[float] = [np.nan, np.inf, -np.inf, 1.0, 3e38, -3e38, -0.0, 1e-45]
    elif values.dtype.kind in "iu":
        info = np.iinfo(values.dtype)
        hostile = [info.max, info.min, 0, 1]
    else:
        return table
    for _ in range(source.randint(1, 4)):
        values[source.randrange(len(values))] = source.choice(hostile)
    changed = pa.ListArray.from_arrays(column.offsets, pa.array(values, column.type.value_type))
    return table.set_column(index, table.field(index), changed)


def _lengths(table: pa.Table, source: random.Random) -> pa.Table:
    """Move a list's border, so that the lists of a rollout differ in length."""
    index = source.randrange(table.num_columns)
    column = table.column(index).combine_chunks()
    if not pa.types.is_list(column.type) or len(column) < 2:
        return table
    offsets = column.offsets.to_numpy().copy()
    at = source.randrange(1, len(offsets) - 1)
    offsets[at] = source.randint(int(offsets[at - 1]), int(offsets[at + 1]))
    changed = pa.ListArray.from_arrays(pa.array(offsets), column.values)
    return table.set_column(index, table.field(index), changed)


def _nulls(table: pa.Table, source: random.Random) -> pa.Table:
    index = source.randrange(table.num_columns)
    column = table.column(index).to_pylist()
    for row in range(len(column)):
        if source.random() < 0.5:
            column[row] = None
    field = table.field(index).with_nullable(True)
    return table.set_column(index, field, pa.array(column, field.type))


def _repeated(table: pa.Table, source: random.Random) -> pa.Table:
    return pa.concat_tables([table] * source.randint(2, 5))


def _empty(table: pa.Table, source: random.Random) -> pa.Table:
    return table.slice(0, 0)


def _metadata(table: pa.Table, source: random.Random) -> pa.Table:
    metadata = dict(table.schema.metadata or {})
    for key in list(metadata) or [b"foreshock"]:
        if source.random() < 0.5:
            metadata[key] = source.choice(
                [b"", b"NaN", b"1e999", b"-1", b"{" * 5000, b"\xff\xfe", b"[" * 2000, b"x" * 100_000, b"null", b"{}"]
            )
    return table.replace_schema_metadata(metadata)


def _ids(table: pa.Table, source: random.Random) -> pa.Table:
    if "sample_id" not in table.column_names:
        return table
    hostile = ["", "../../x", "a" * 10_000, "\x00", "<script>", "'; DROP TABLE runs;--", "same", "same", "𝕏" * 300]
    values = [source.choice(hostile) for _ in range(table.num_rows)]
    return table.set_column(table.column_names.index("sample_id"), "sample_id", pa.array(values))


_CHANGES: tuple[Callable[[pa.Table, random.Random], pa.Table], ...] = (
    _other_type, _without, _extra, _values, _values, _lengths, _nulls, _repeated, _empty, _metadata, _ids,
)  # fmt: skip


def _column(rows: int, source: random.Random) -> pa.Array:
    """Return a column of a random type."""
    integer = list(range(rows))
    makers: list[Callable[[], pa.Array]] = [
        lambda: pa.array(integer, pa.int64()),
        lambda: pa.array([2**63 - 1] * rows, pa.int64()),
        lambda: pa.array([float("nan")] * rows),
        lambda: pa.array([None] * rows, pa.null()),
        lambda: pa.array([b"\xff\xfe\x00"] * rows),
        lambda: pa.array(["x" * 1000] * rows).dictionary_encode(),
        lambda: pa.array([[[[1]]]] * rows),
        lambda: pa.array([{"a": {"b": [1]}}] * rows),
        lambda: pa.array([[]] * rows, pa.list_(pa.float32())),
        lambda: pa.array([[-1]] * rows, pa.list_(pa.int32())),
        lambda: pa.array([[float("inf")]] * rows, pa.list_(pa.float64())),
        lambda: pa.array([True] * rows),
        lambda: pa.array(integer, pa.timestamp("ns")),
        lambda: pa.array([["a", None]] * rows, pa.list_(pa.string())),
        lambda: pa.array([[1, 2]] * rows, pa.list_(pa.int32(), 2)),
        lambda: pa.array([[("k", 1)]] * rows, pa.map_(pa.string(), pa.int32())),
    ]
    return source.choice(makers)()


def _written(table: pa.Table, **options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def _lists(values: pa.Array, rows: int) -> pa.Array:
    offsets = np.linspace(0, len(values), rows + 1).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _rollouts(rows: int, values: pa.Array, ids: pa.Array) -> pa.Table:
    tokens = _lists(values, rows)
    return pa.table({"sample_id": ids, "prompt_token_ids": _lists(pa.array([1] * rows, pa.int32()), rows),
                     "response_token_ids": tokens, "rollout_log_probs": tokens.cast(pa.list_(pa.float32())),
                     "trainer_log_probs": tokens.cast(pa.list_(pa.float32()))})  # fmt: skip


def _dictionary_bomb(source: random.Random) -> bytes:
    """Return a file whose rows all use one dictionary string of 1 MiB: gigabytes if read as plain strings."""
    rows = source.choice([1_000, 8_000])
    ids = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["x" * (1 << 20)]))
    table = _rollouts(rows, pa.array(np.zeros(rows, np.int32)), ids)
    return _written(table, compression="zstd", use_dictionary=["sample_id"])


def _run_bomb(source: random.Random) -> bytes:
    """Return a file of millions of equal tokens in a few kilobytes."""
    tokens = source.choice([2_000_000, 30_000_000])
    return _written(_rollouts(4, pa.array(np.zeros(tokens, np.int32)), _names(4)), compression="zstd")


def _many_row_groups(source: random.Random) -> bytes:
    rows = 2_000
    return _written(_rollouts(rows, pa.array(np.zeros(rows, np.int32)), _names(rows)), row_group_size=1)


def _names(rows: int) -> pa.Array:
    return pa.array([f"s{row}" for row in range(rows)])


def _many_columns(source: random.Random) -> bytes:
    return _written(pa.table({f"column-{number}": [1] for number in range(3_000)}))


def _deep_nesting(source: random.Random) -> bytes:
    kind: pa.DataType = pa.int32()
    for level in range(source.choice([50, 200])):
        kind = pa.list_(kind) if level % 2 else pa.struct([("a", kind)])
    return _written(pa.table({"sample_id": pa.array([None], kind)}))
