"""Open Parquet files that are not trusted, and read all or some of their rollouts.

The footer is checked before a value is decoded: rows, row groups, decoded bytes, metadata and columns. The number of
tokens cannot be read from it safely (Arrow ends the process if it reads this from a damaged column chunk), so tokens
are counted while row groups are decoded. Only the memory of the process bounds what a page claims beyond that: decode
bodies from outside in a process with a memory limit, and with pyarrow > 23.0.0; older releases can crash on damaged
pages.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import BinaryIO, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from foreshock.errors import InvalidRolloutsError, LimitExceededError, RolloutsError
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.parquet_columns import ColumnReader, is_list_type, to_batch, to_scores
from foreshock.rollouts.schema import (
    ATTRIBUTES_KEY,
    ROLLOUT_COLUMNS,
    SCORE_COLUMNS,
    ColumnSpec,
    DecodeLimits,
)
from foreshock.rollouts.scores import ScoreBatch
from foreshock.rollouts.validation import validate_rollouts, validate_scores

ROLLOUTS_PER_ROW_GROUP = 64

_MAGIC = b"PAR1"
_TRAILER_BYTES = 8
_NAME_CHARACTERS = 80
_BATCH_ROWS = 1_024
_ALL: Collection[str] = ()
_SAMPLE_ID = next(column for column in ROLLOUT_COLUMNS if column.name == "sample_id")
_OWN_KEYS = [b"ARROW:schema", ATTRIBUTES_KEY]


class OpenableFile(Protocol):
    """A file that can be opened for reading parts of it."""

    def open(self) -> BinaryIO:
        """Open the file."""


Found = TypeVar("Found", RolloutBatch, ScoreBatch)


def find_rollouts(
    file: OpenableFile, sample_ids: Collection[str], limits: DecodeLimits, *, only: Collection[str] = _ALL
) -> RolloutBatch | None:
    """Return the rollouts of the row groups that hold any of these sample ids; None if none does.

    `only` names the columns to read, with the required ones among them. Raises as `decode_rollouts`.
    """
    return _find(file, sample_ids, ROLLOUT_COLUMNS, to_batch, validate_rollouts, limits, only)


def find_scores(file: OpenableFile, sample_ids: Collection[str], limits: DecodeLimits) -> ScoreBatch | None:
    """Return the scores of the row groups that hold any of these sample ids; see `find_rollouts`."""
    return _find(file, sample_ids, SCORE_COLUMNS, to_scores, validate_scores, limits)


class RolloutFile:
    """A file of rollouts that is read one row group at a time; only one is in memory."""

    def __init__(self, file: OpenableFile, limits: DecodeLimits, *, only: Collection[str] = _ALL) -> None:
        """Read the footer and all sample ids; `only` as in `find_rollouts`. Raises as `decode_rollouts`."""
        self._limits = limits
        self._columns = _those(ROLLOUT_COLUMNS, only)
        self._opened = file.open()
        with arrow_errors():
            self._file = open_checked(pa.PythonFile(self._opened, "r"), ROLLOUT_COLUMNS, limits)
            self.sample_ids: list[list[str]] = _sample_ids(self._file, limits)
        self.column_names = frozenset(self._file.schema_arrow.names)

    def __del__(self) -> None:
        if hasattr(self, "_opened"):
            self._opened.close()

    def read(self, group: int) -> RolloutBatch:
        """Return the rollouts of a row group. Raises as `decode_rollouts`."""
        with arrow_errors():
            batch = to_batch(_read_groups(self._file, [group], self._columns, self._limits))
        validate_rollouts(batch, self._limits)
        return batch


def open_checked(source: pa.NativeFile, columns: tuple[ColumnSpec, ...], limits: DecodeLimits) -> pq.ParquetFile:
    """Return the opened file after checking its footer. Raises as `decode_rollouts`, and Arrow's own errors."""
    _check_footer_size(source, limits)
    bounds = dict.fromkeys(("thrift_string_size_limit", "thrift_container_size_limit"), limits.max_footer_bytes)
    file = pq.ParquetFile(source, **bounds)
    _check_claims(file.metadata, limits)
    _check_schema(file.schema_arrow, columns)
    # Strings stay dictionaries, so that a long string repeated in every row takes its memory once.
    strings = [column.name for column in columns if column.is_string and column.name in file.schema_arrow.names]
    return pq.ParquetFile(
        source, metadata=file.metadata, read_dictionary=strings, page_checksum_verification=True, **bounds
    )


def read_all(file: pq.ParquetFile, limits: DecodeLimits) -> ColumnReader:
    """Return all columns; decode a few rows at a time, and check their bytes and tokens against `limits`."""
    batches, decoded, tokens = [], 0, dict.fromkeys(file.schema_arrow.names, 0)
    for batch in file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
        batches.append(batch)
        decoded += batch.nbytes
        if decoded > limits.max_uncompressed_bytes:
            raise _decodes_to_too_much(limits)
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if is_list_type(column.type):
                tokens[name] += len(column.flatten())
                if tokens[name] > limits.max_tokens:
                    raise LimitExceededError(
                        f"more than the {limits.max_tokens:,} tokens of one shard",
                        column=name,
                        advice="send more shards",
                    )
    table = pa.Table.from_batches(batches, schema=file.schema_arrow)
    table.validate(full=True)
    return ColumnReader(table, limits)


def has_own_layout(file: pq.ParquetFile) -> bool:
    """Return True if a file has the layout of `encode_rollouts`, so that it can be stored unchanged.

    Encoding again takes as long as decoding. A body of another writer, for example with one large row group, is encoded
    again, so that all stored files are read in the same way. Call this only for a file that was read: Arrow ends the
    process if it is asked for a column chunk that it could not read.
    """
    metadata = file.metadata
    schema = metadata.schema.to_arrow_schema()
    specs = [column for column in ROLLOUT_COLUMNS if column.name in schema.names]
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    chunks = (group.column(index) for group in groups for index in range(len(specs)))
    return (
        [column.name for column in specs] == schema.names
        and sorted(metadata.metadata or {}) == _OWN_KEYS
        and all(kind in column.arrow_types() for column, kind in zip(specs, schema.types, strict=True))
        and all(group.num_rows == ROLLOUTS_PER_ROW_GROUP for group in groups[:-1])
        and groups[-1].num_rows <= ROLLOUTS_PER_ROW_GROUP
        # Other writers have statistics by default, and no page checksums.
        and all(chunk.compression == "ZSTD" and not chunk.is_stats_set for chunk in chunks)
    )


@contextlib.contextmanager
def arrow_errors() -> Iterator[None]:
    """Convert any error that Arrow raises for a damaged or hostile file to an InvalidRolloutsError.

    Errors of the system, which have an `errno`, are raised unchanged: the file is missing or cannot be read.
    """
    try:
        yield
    except RolloutsError:
        raise
    except MemoryError as error:
        raise LimitExceededError(
            "it needs more memory than is available", advice="send more, smaller shards"
        ) from error
    except (pa.ArrowException, OSError, ValueError, TypeError, LookupError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise InvalidRolloutsError(f"this is not a readable Parquet file: {reason}") from error


def _find(
    file: OpenableFile,
    sample_ids: Collection[str],
    columns: tuple[ColumnSpec, ...],
    convert: Callable[[ColumnReader], Found],
    validate: Callable[[Found, DecodeLimits], None],
    limits: DecodeLimits,
    only: Collection[str] = _ALL,
) -> Found | None:
    wanted = frozenset(sample_ids)
    with arrow_errors(), file.open() as opened:
        parquet = open_checked(pa.PythonFile(opened, "r"), columns, limits)
        groups = [group for group, ids in enumerate(_sample_ids(parquet, limits)) if not wanted.isdisjoint(ids)]
        if not groups:
            return None
        found = convert(_read_groups(parquet, groups, _those(columns, only), limits))
    validate(found, limits)
    return found


def _sample_ids(file: pq.ParquetFile, limits: DecodeLimits) -> list[list[str]]:
    """Return the sample ids of each row group."""
    rows = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    names = _read_groups(file, range(len(rows)), (_SAMPLE_ID,), limits).strings(_SAMPLE_ID)
    ends = list(accumulate(rows))
    return [names[end - count : end] for end, count in zip(ends, rows, strict=True)]


def _read_groups(
    file: pq.ParquetFile, groups: Sequence[int], columns: tuple[ColumnSpec, ...], limits: DecodeLimits
) -> ColumnReader:
    names = {column.name for column in columns}
    kept = [name for name in file.schema_arrow.names if name in names]
    table = file.read_row_groups(list(groups), columns=kept, use_threads=False)
    table.validate(full=True)
    return ColumnReader(table, limits)


def _those(columns: tuple[ColumnSpec, ...], only: Collection[str]) -> tuple[ColumnSpec, ...]:
    return tuple(column for column in columns if column.name in only) if only else columns


def _check_footer_size(source: pa.NativeFile, limits: DecodeLimits) -> None:
    size = source.size()
    trailer = b""
    if size >= len(_MAGIC) + _TRAILER_BYTES:
        source.seek(size - _TRAILER_BYTES)
        trailer = source.read(_TRAILER_BYTES)
    if trailer[-4:] != _MAGIC:
        raise InvalidRolloutsError("this is not a Parquet file", advice="send the bytes that `encode_rollouts` returns")
    footer_bytes = int.from_bytes(trailer[:4], "little")
    if footer_bytes > limits.max_footer_bytes:
        raise LimitExceededError(
            f"the footer has {footer_bytes:,} bytes, more than {limits.max_footer_bytes:,}: write larger row groups"
        )


def _check_claims(metadata: pq.FileMetaData, limits: DecodeLimits) -> None:
    """Check the numbers of rows and row groups, the decoded bytes, and the bytes of metadata."""
    if metadata.num_row_groups > limits.max_row_groups:
        raise LimitExceededError(
            f"{metadata.num_row_groups:,} row groups are more than {limits.max_row_groups:,}: write larger ones"
        )
    if metadata.num_rows > limits.max_rollouts:
        raise LimitExceededError(
            f"{metadata.num_rows:,} rollouts are more than the {limits.max_rollouts:,} of one shard",
            advice="send more shards",
        )
    if metadata.num_rows == 0:
        raise InvalidRolloutsError("there are no rows", advice="send at least one rollout")
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    if any(group.num_rows < 0 for group in groups) or sum(group.num_rows for group in groups) != metadata.num_rows:
        raise InvalidRolloutsError("this is not a readable Parquet file: its row groups do not add up to its rows")
    for key, value in (metadata.metadata or {}).items():
        if len(value) > limits.max_metadata_bytes:
            name = key[:_NAME_CHARACTERS].decode(errors="replace")
            raise LimitExceededError(f"the metadata {name!r} has more than {limits.max_metadata_bytes:,} bytes")
    if sum(group.total_byte_size for group in groups) > limits.max_uncompressed_bytes:
        raise _decodes_to_too_much(limits)


def _decodes_to_too_much(limits: DecodeLimits) -> LimitExceededError:
    return LimitExceededError(
        f"it decodes to more than {limits.max_uncompressed_bytes:,} bytes", advice="send more, smaller shards"
    )


def _check_schema(schema: pa.Schema, columns: tuple[ColumnSpec, ...]) -> None:
    """Check that the columns are those of the schema, each once, of a type that can hold its values."""
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
                f"must be {specs[field.name].type_name()}, got {str(field.type)[:_NAME_CHARACTERS]}",
                column=field.name,
            )
    for column in columns:
        if column.required and column.name not in seen:
            raise InvalidRolloutsError(f"is missing: it is required, as {column.type_name()}", column=column.name)


def _accepts(column: ColumnSpec, given: pa.DataType) -> bool:
    """Return True if `given` is the column's type or one that holds the same values (see `schema.py`)."""
    if column.level != "rollout or response token" and is_list_type(given) != (column.side is not None):
        return False
    values = given.value_type if is_list_type(given) or pa.types.is_dictionary(given) else given
    if column.is_string:
        is_view = getattr(pa.types, "is_string_view", lambda _type: False)
        return bool(pa.types.is_string(values) or pa.types.is_large_string(values) or is_view(values))
    if pa.types.is_dictionary(given):
        return False
    if column.dtype.kind == "f":
        return bool(pa.types.is_floating(values))
    return bool(pa.types.is_integer(values))
