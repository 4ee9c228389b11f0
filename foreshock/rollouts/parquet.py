"""Encode and decode rollouts and scores as Parquet: plain lists that any Parquet reader reads.

A row group has 64 rollouts, so that one rollout can be read without the rest. Compression is zstd; lists of floats are
split by byte position first (BYTE_STREAM_SPLIT), without which log-probs hardly compress. Arrow gets arrays as buffers:
`pyarrow.array` imports pandas if it is installed, and a trainer's threads would wait half a second for that import.

A body is not trusted; `parquet_files.py` opens and checks it. Every error that Arrow raises becomes an
InvalidRolloutsError.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from foreshock.errors import LimitExceededError
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.parquet_columns import ColumnReader, to_batch, to_scores
from foreshock.rollouts.parquet_files import (
    ROLLOUTS_PER_ROW_GROUP,
    arrow_errors,
    has_own_layout,
    open_checked,
    read_all,
)
from foreshock.rollouts.schema import (
    ATTRIBUTES_KEY,
    FINGERPRINT_KEY,
    ROLLOUT_COLUMNS,
    SCORE_COLUMNS,
    ColumnSpec,
    DecodeLimits,
)
from foreshock.rollouts.scores import ScoreBatch
from foreshock.rollouts.validation import validate_rollouts, validate_scores

Body = bytes | bytearray | memoryview | BinaryIO


def encode_rollouts(batch: RolloutBatch) -> bytes:
    """Return `batch` as the bytes of a Parquet file; equal batches give equal bytes under one pyarrow version."""
    return bytes(encode_rollouts_view(batch))


def encode_rollouts_view(batch: RolloutBatch) -> memoryview:
    """Return the bytes of `encode_rollouts` without a copy: copying 100 MB holds the GIL for 50 ms or more."""
    columns = []
    for column in ROLLOUT_COLUMNS:
        value = getattr(batch, column.field)
        if value is not None:
            columns.append((column, _to_arrow(column, value, batch.offsets_of(column))))
    return _write(columns, {ATTRIBUTES_KEY: batch.attributes.to_json().encode()})


def encode_scores(scores: ScoreBatch) -> bytes:
    """Return `scores` as the bytes of a Parquet file, with the fingerprint in its metadata."""
    columns = [
        (column, _to_arrow(column, getattr(scores, column.field), None if column.is_string else scores.offsets))
        for column in SCORE_COLUMNS
    ]
    return bytes(_write(columns, {FINGERPRINT_KEY: scores.fingerprint.to_json().encode()}))


def decode_rollouts(data: Body, limits: DecodeLimits | None = None, *, check_values: bool = True) -> RolloutBatch:
    """Return the validated batch in `data`; with `check_values=False` only shapes are validated.

    Raises InvalidRolloutsError (with `.row` and `.column`) if it breaks the schema or a rule, LimitExceededError if it
    is larger than `limits`.
    """
    limits = limits or DecodeLimits()
    with arrow_errors():
        batch = to_batch(_read(data, ROLLOUT_COLUMNS, limits))
    validate_rollouts(batch, limits, check_values=check_values)
    return batch


@dataclass(frozen=True, slots=True)
class ReadRollouts:
    """The validated batch of a body; `own_layout` is True if it can be stored unchanged (see `has_own_layout`)."""

    batch: RolloutBatch
    own_layout: bool


def read_rollouts(data: Body, limits: DecodeLimits) -> ReadRollouts:
    """Decode and validate as `decode_rollouts`; also return whether the body can be stored unchanged."""
    with arrow_errors():
        file = open_checked(pa.BufferReader(_body(data, limits)), ROLLOUT_COLUMNS, limits)
        batch = to_batch(read_all(file, limits))
        own_layout = has_own_layout(file)
    validate_rollouts(batch, limits)
    # Attributes of a newer release are not kept.
    known = (file.metadata.metadata or {}).get(ATTRIBUTES_KEY) == batch.attributes.to_json().encode()
    return ReadRollouts(batch, own_layout and known)


def decode_scores(data: Body, limits: DecodeLimits | None = None) -> ScoreBatch:
    """Return the validated scores in `data`; raises as `decode_rollouts`, and if the fingerprint is missing."""
    limits = limits or DecodeLimits()
    with arrow_errors():
        scores = to_scores(_read(data, SCORE_COLUMNS, limits))
    validate_scores(scores, limits)
    return scores


def _read(data: Body, columns: tuple[ColumnSpec, ...], limits: DecodeLimits) -> ColumnReader:
    return read_all(open_checked(pa.BufferReader(_body(data, limits)), columns, limits), limits)


def _to_arrow(column: ColumnSpec, value: Any, offsets: NDArray[np.int64] | None) -> pa.Array:
    if column.is_string:
        return _string_array(value)
    values = np.asarray(value, column.dtype)
    if offsets is None:
        return _number_array(values, missing=np.isnan(values) if column.dtype.kind == "f" else None)
    ends = _number_array(offsets.astype(np.int32))
    return pa.ListArray.from_arrays(ends, _number_array(values), type=column.arrow_type(per_token=True))


def _write(columns: list[tuple[ColumnSpec, pa.Array]], metadata: dict[bytes, bytes]) -> memoryview:
    schema = pa.schema([pa.field(column.name, array.type) for column, array in columns], metadata=metadata)
    table = pa.Table.from_arrays([array for _, array in columns], schema=schema)
    sink = pa.BufferOutputStream()
    floats = [
        f"{column.name}.list.element"
        for column, array in columns
        if column.dtype.kind == "f" and pa.types.is_list(array.type)
    ]
    pq.write_table(
        table,
        sink,
        row_group_size=ROLLOUTS_PER_ROW_GROUP,
        compression="zstd",
        use_dictionary=[column.name for column, _ in columns if column.is_string],
        use_byte_stream_split=floats,
        write_statistics=False,
        write_page_checksum=True,
    )
    return memoryview(sink.getvalue())


def _body(data: Body, limits: DecodeLimits) -> pa.Buffer:
    if isinstance(data, io.IOBase) or hasattr(data, "read"):
        data = _read_most(data, limits.max_body_bytes + 1)
    size = memoryview(data).nbytes
    if size > limits.max_body_bytes:
        raise LimitExceededError(
            f"the body has more than the {limits.max_body_bytes:,} bytes of one shard",
            advice="send more, smaller shards",
        )
    return pa.py_buffer(data)


def _read_most(file: Any, most: int) -> bytes:
    """Read up to `most` bytes. Python allocates as many as requested, so request no more than the file has."""
    if file.seekable():
        begin = file.tell()
        most = min(most, file.seek(0, io.SEEK_END) - begin)
        file.seek(begin)
    data: bytes = file.read(most)
    return data


def _number_array(values: NDArray[Any], *, missing: NDArray[np.bool_] | None = None) -> pa.Array:
    """Return numbers [N] as an Arrow array of the same type that shares their memory; null if `missing` [N]."""
    values = np.ascontiguousarray(values)
    arrow_type = getattr(pa, values.dtype.name)()
    return pa.Array.from_buffers(arrow_type, values.size, [_bitmap(missing), pa.py_buffer(values)])


def _string_array(values: Sequence[str | None]) -> pa.Array:
    """Return N strings as an Arrow array; None is null."""
    texts = [b"" if value is None else value.encode() for value in values]
    offsets = np.zeros(len(texts) + 1, np.int32)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    missing = np.fromiter((value is None for value in values), np.bool_, len(texts))
    buffers = [_bitmap(missing), pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(pa.string(), len(texts), buffers)


def _bitmap(missing: NDArray[np.bool_] | None) -> pa.Buffer | None:
    """Return Arrow's bitmap of valid values, None if all are."""
    if missing is None or not missing.any():
        return None
    return pa.py_buffer(np.packbits(~missing, bitorder="little"))
