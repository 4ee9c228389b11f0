"""Read some rollouts of a Parquet file without the rest of it: only the row groups that hold them.

The bytes that are read are checked as those of a whole body are: the footer, the headers and the checksums of the pages
of these row groups. A file with one large row group is read as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.limits import DecodeLimits
from foreshock.rollouts.parquet_batches import arrow_errors, to_batch, to_scores
from foreshock.rollouts.parquet_columns import ColumnReader
from foreshock.rollouts.parquet_footer import bounds_of, check_claims, check_schema, footer_bytes_of, read_footer
from foreshock.rollouts.parquet_pages import (
    FILE_ROW_GROUPS,
    GROUP_ROWS,
    ColumnChunk,
    check_pages,
    chunks_of,
    number,
    structs,
)
from foreshock.rollouts.schema import ROLLOUT_COLUMNS, SCORE_COLUMNS, ColumnSpec
from foreshock.rollouts.scores import ScoreBatch
from foreshock.rollouts.sized_file import SizedFile
from foreshock.rollouts.validation import validate_rollouts, validate_scores

__all__ = ["RangedFile", "find_rollouts", "find_scores"]

# The footer of 1,024 rollouts has about 10 kB.
_END_BYTES = 64 << 10
_MAGIC = b"PAR1"
_SAMPLE_ID = next(column for column in ROLLOUT_COLUMNS if column.name == "sample_id")


class RangedFile(Protocol):
    """A file of which ranges can be read."""

    def read_end(self, most: int) -> tuple[bytes, int]:
        """Return the last `most` bytes of the file, or all of a shorter one, and the size of the file in bytes."""

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range: from its start to before its end."""


Found = TypeVar("Found", RolloutBatch, ScoreBatch)


def find_rollouts(file: RangedFile, sample_ids: Collection[str], limits: DecodeLimits) -> RolloutBatch | None:
    """Return the rollouts of the row groups that hold any of these sample ids; None if none does.

    Raises InvalidRolloutsError or LimitExceededError as `decode_rollouts`, for what it reads.
    """
    return _find(file, sample_ids, ROLLOUT_COLUMNS, to_batch, validate_rollouts, limits)


def find_scores(file: RangedFile, sample_ids: Collection[str], limits: DecodeLimits) -> ScoreBatch | None:
    """Return the scores of the row groups that hold any of these sample ids; see `find_rollouts`."""
    return _find(file, sample_ids, SCORE_COLUMNS, to_scores, validate_scores, limits)


def _find(
    file: RangedFile,
    sample_ids: Collection[str],
    columns: tuple[ColumnSpec, ...],
    convert: Callable[[ColumnReader], Found],
    validate: Callable[[Found, DecodeLimits], None],
    limits: DecodeLimits,
) -> Found | None:
    with arrow_errors():
        groups = _RowGroups(file, columns, limits)
        wanted = groups.holding(frozenset(sample_ids))
        if not wanted:
            return None
        found = convert(groups.read(wanted, columns))
    validate(found, limits)
    return found


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a checked footer says: the column chunks and rows of each row group, and the columns with strings."""

    chunks: tuple[tuple[ColumnChunk, ...], ...]
    rows: tuple[int, ...]
    names: tuple[str, ...]
    strings: tuple[str, ...]


def _read_layout(end: bytes, size: int, columns: tuple[ColumnSpec, ...], limits: DecodeLimits) -> _Layout:
    """Check the footer in `end`, the last bytes of a file of so many."""
    footer, _ = read_footer(end, size, limits)
    groups = structs(footer, FILE_ROW_GROUPS)
    chunks = tuple(tuple(chunks_of({FILE_ROW_GROUPS: [group]})) for group in groups)
    check_claims(footer, [chunk for group in chunks for chunk in group], limits)
    # A footer alone is a file without pages.
    schema = pq.ParquetFile(pa.BufferReader(_MAGIC + end), **bounds_of(limits)).schema_arrow
    check_schema(schema, columns)
    strings = {column.name for column in columns if column.is_string}
    return _Layout(
        chunks,
        tuple(number(group, GROUP_ROWS) for group in groups),
        tuple(schema.names),
        tuple(name for name in schema.names if name in strings),
    )


# Reading the footer of 1,024 rollouts takes as long as reading a row group.
_remembered_layout = lru_cache(maxsize=64)(_read_layout)


class _RowGroups:
    """A file whose footer is read and checked."""

    def __init__(self, file: RangedFile, columns: tuple[ColumnSpec, ...], limits: DecodeLimits) -> None:
        self._file, self._limits = file, limits
        end, size = file.read_end(_END_BYTES)
        footer_bytes = footer_bytes_of(end, limits)
        if footer_bytes > len(end):
            end, size = file.read_end(footer_bytes)
        read_layout = _remembered_layout if footer_bytes <= _END_BYTES else _read_layout
        self._layout = read_layout(end[-footer_bytes:], size, columns, limits)
        self._ranges = _Ranges(size)
        self._ranges.add(size - len(end), end)

    def holding(self, sample_ids: frozenset[str]) -> list[int]:
        """Return the numbers of the row groups that hold any of the sample ids."""
        names = self.read(range(len(self._layout.rows)), (_SAMPLE_ID,)).strings(_SAMPLE_ID)
        found, first = [], 0
        for number_of_group, rows in enumerate(self._layout.rows):
            if not sample_ids.isdisjoint(names[first : first + rows]):
                found.append(number_of_group)
            first += rows
        return found

    def read(self, groups: Sequence[int], columns: tuple[ColumnSpec, ...]) -> ColumnReader:
        """Return these columns of the row groups, of those that the file has."""
        names = {column.name for column in columns}
        self._fetch([[chunk for chunk in self._layout.chunks[group] if chunk.column in names] for group in groups])
        file = pq.ParquetFile(
            pa.PythonFile(self._ranges, "r"),
            read_dictionary=list(self._layout.strings),
            page_checksum_verification=True,
            **bounds_of(self._limits),
        )
        kept = [name for name in self._layout.names if name in names]
        table = file.read_row_groups(list(groups), columns=kept, use_threads=False)
        table.validate(full=True)
        return ColumnReader(table, dict(file.schema_arrow.metadata or {}), self._limits)

    def _fetch(self, groups: Sequence[Sequence[ColumnChunk]]) -> None:
        """Read the pages of these chunks, a range for each row group, and check their headers."""
        ranges = [
            (min(chunk.start for chunk in group), max(chunk.start + chunk.compressed_bytes for chunk in group))
            for group in groups
        ]
        for group, (start, _), data in zip(groups, ranges, self._file.read_ranges(ranges), strict=True):
            check_pages(memoryview(data), group, start)
            self._ranges.add(start, data)


class _Ranges(SizedFile):
    """Those parts of a file that were read, as a seekable file with zeros elsewhere.

    Arrow reads what lies between two small chunks with them, and drops it.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._parts: list[tuple[int, memoryview]] = []

    def add(self, start: int, data: bytes) -> None:
        """Add the bytes that begin at `start`; parts may overlap."""
        self._parts.append((start, memoryview(data)))

    def read(self, size: int = -1) -> Any:
        """Return `size` bytes, fewer at the end of the file."""
        start = self._position
        end = self._size if size < 0 else min(start + size, self._size)
        found = bytearray(max(0, end - start))
        for first, data in self._parts:
            begin, stop = max(start, first), min(end, first + len(data))
            if begin < stop:
                found[begin - start : stop - start] = data[begin - first : stop - first]
        self._position += len(found)
        return bytes(found)
