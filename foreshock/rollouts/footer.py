"""What is checked of a Parquet body before any of its values is decoded.

A footer is a few kilobytes that say how much the rest will become: rows, row groups, and per column chunk the number of
values and their uncompressed size. A body that claims more than the limits allow is refused on that claim; one whose
pages then hold more than its footer claimed is caught while decoding (and, in the service, by the memory limit of the
process that decodes).
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from foreshock.errors import InvalidRolloutsError, LimitExceededError
from foreshock.rollouts.limits import DecodeLimits
from foreshock.rollouts.schema import ColumnSpec

__all__ = ["open_checked"]

_MAGIC = b"PAR1"
_TRAILER_BYTES = 8
_NAME_CHARACTERS = 80
# A value of a list, as wide as float32 or int32.
_DECODED_BYTES = 4


def open_checked(body: pa.Buffer, columns: tuple[ColumnSpec, ...], limits: DecodeLimits) -> pq.ParquetFile:
    """The opened file, whose footer promises no more than `limits` and exactly the schema's columns.

    Raises InvalidRolloutsError or LimitExceededError; Arrow's own errors pass through to the caller.
    """
    _check_frame(body, limits)
    file = pq.ParquetFile(
        pa.BufferReader(body),
        thrift_string_size_limit=limits.max_footer_bytes,
        thrift_container_size_limit=limits.max_footer_bytes,
    )
    metadata = file.metadata
    if metadata.num_row_groups > limits.max_row_groups:
        raise LimitExceededError(
            f"{metadata.num_row_groups:,} row groups are more than {limits.max_row_groups:,}: write larger ones"
        )
    if metadata.num_rows > limits.max_rollouts:
        raise LimitExceededError(
            f"{metadata.num_rows:,} rollouts are more than the {limits.max_rollouts:,} of one shard: send more shards"
        )
    if metadata.num_rows <= 0:
        raise InvalidRolloutsError("there are no rows: send at least one rollout")
    for key, value in (metadata.metadata or {}).items():
        if len(value) > limits.max_metadata_bytes:
            name = key[:_NAME_CHARACTERS].decode(errors="replace")
            raise LimitExceededError(f"the metadata {name!r} has more than {limits.max_metadata_bytes:,} bytes")
    _check_schema(file.schema_arrow, columns)
    _check_sizes(metadata, columns, limits)
    # Strings stay dictionaries: a long one repeated in every row must not be written out row by row.
    strings = {column.name for column in columns if column.value_type == "string"}
    return pq.ParquetFile(
        pa.BufferReader(body),
        metadata=metadata,
        read_dictionary=sorted(strings.intersection(file.schema_arrow.names)),
    )


def _check_frame(body: pa.Buffer, limits: DecodeLimits) -> None:
    """A Parquet file starts and ends with PAR1; before the last one stands the footer's size."""
    view = memoryview(body)
    if view.nbytes < len(_MAGIC) + _TRAILER_BYTES or bytes(view[:4]) != _MAGIC or bytes(view[-4:]) != _MAGIC:
        raise InvalidRolloutsError("this is not a Parquet file: send the bytes that `encode_rollouts` gives")
    footer_bytes = int.from_bytes(view[-8:-4], "little")
    if footer_bytes > limits.max_footer_bytes:
        raise LimitExceededError(f"the Parquet footer has more than {limits.max_footer_bytes:,} bytes")
    if footer_bytes > view.nbytes - len(_MAGIC) - _TRAILER_BYTES:
        raise InvalidRolloutsError("this is not a readable Parquet file: its footer is cut off")


def _check_schema(schema: pa.Schema, columns: tuple[ColumnSpec, ...]) -> None:
    """The columns must be those of the schema, each once, each of a type that can hold its values."""
    specs = {column.name: column for column in columns}
    seen: set[str] = set()
    for field in schema:
        if field.name not in specs:
            raise InvalidRolloutsError(
                f"is not a column of the schema: leave it out (the columns are {', '.join(specs)})",
                column=field.name[:_NAME_CHARACTERS],
            )
        if field.name in seen:
            raise InvalidRolloutsError("appears twice: write each column once", column=field.name)
        seen.add(field.name)
        if not _accepts(specs[field.name], field.type):
            raise InvalidRolloutsError(
                f"must be {specs[field.name].type_name()}, and is {str(field.type)[:_NAME_CHARACTERS]}",
                column=field.name,
            )
    for column in columns:
        if column.required and column.name not in seen:
            raise InvalidRolloutsError(f"is missing: it is required, as {column.type_name()}", column=column.name)


def _accepts(column: ColumnSpec, given: pa.DataType) -> bool:
    """Whether `given` is the column's type or one that holds the same values (see `schema.py`)."""
    is_list = pa.types.is_list(given) or pa.types.is_large_list(given) or pa.types.is_fixed_size_list(given)
    if is_list and column.shape == "rollout":
        return False
    if not is_list and column.shape in ("prompt", "response"):
        return False
    values = given.value_type if is_list or pa.types.is_dictionary(given) else given
    if column.value_type == "string":
        is_view = getattr(pa.types, "is_string_view", lambda _type: False)
        return bool(pa.types.is_string(values) or pa.types.is_large_string(values) or is_view(values))
    if pa.types.is_dictionary(given):
        return False
    if column.value_type == "float32":
        return bool(pa.types.is_floating(values))
    return bool(pa.types.is_integer(values))


def _check_sizes(metadata: pq.FileMetaData, columns: tuple[ColumnSpec, ...], limits: DecodeLimits) -> None:
    """Sum what the column chunks claim to hold, and what that becomes once decoded."""
    uncompressed, rows = 0, 0
    values = [0] * metadata.num_columns
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        if group.num_rows < 0:
            raise InvalidRolloutsError("this is not a readable Parquet file: a row group has less than no rows")
        rows += group.num_rows
        for position in range(metadata.num_columns):
            chunk = group.column(position)
            if chunk.num_values < 0 or chunk.total_uncompressed_size < 0:
                raise InvalidRolloutsError("this is not a readable Parquet file: a column has less than no values")
            uncompressed += chunk.total_uncompressed_size
            values[position] += chunk.num_values
    if rows != metadata.num_rows:
        raise InvalidRolloutsError("this is not a readable Parquet file: its row groups do not add up to its rows")
    widths = {column.name: 4 if column.value_type == "string" else _DECODED_BYTES for column in columns}
    decoded = 0
    for position, count in enumerate(values):
        name = metadata.schema.column(position).path.split(".")[0]
        decoded += count * widths[name]
        # An empty list is one value too, as far as a footer counts.
        if count > limits.max_tokens + rows:
            raise LimitExceededError(
                f"{count:,} tokens are more than the {limits.max_tokens:,} of one shard: send more shards", column=name
            )
    # Run-length encoding makes a million equal values of a few bytes, so the sizes of pages alone bound nothing.
    if max(uncompressed, decoded) > limits.max_uncompressed_bytes:
        raise LimitExceededError(
            f"it decodes to {max(uncompressed, decoded):,} bytes, more than {limits.max_uncompressed_bytes:,}: "
            "send more, smaller shards"
        )
