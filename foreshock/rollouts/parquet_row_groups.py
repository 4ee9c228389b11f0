"""Read some rollouts of a Parquet file without the rest of it: only the row groups that hold them.

The bytes that are read are checked as those of a whole body are: the footer, the headers and the checksums of the pages
of these row groups. A file with one large row group is read as a whole.

Files are immutable. Of those that were read last it is remembered what their footers say and, as hashes, which row
group holds which sample id: reading all sample ids takes as long as reading a row group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.exact import ExactBatch
from foreshock.rollouts.limits import DecodeLimits
from foreshock.rollouts.parquet_batches import arrow_errors, to_batch, to_exact, to_scores
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
from foreshock.rollouts.schema import EXACT_COLUMNS, ROLLOUT_COLUMNS, SCORE_COLUMNS, ColumnSpec
from foreshock.rollouts.scores import ScoreBatch
from foreshock.rollouts.sized_file import SizedFile
from foreshock.rollouts.validation import validate_exact, validate_rollouts, validate_scores

__all__ = ["RangedFile", "RolloutFile", "find_exact", "find_rollouts", "find_scores"]

# The footer of 1,024 rollouts has about 10 kB.
_END_BYTES = 64 << 10
# With 64 kB of footer and 12 bytes a sample id, 64 files take at most 30 MB.
_REMEMBERED_FILES, _REMEMBERED_SAMPLE_IDS = 64, 16_384
_MAGIC = b"PAR1"
_SAMPLE_ID = next(column for column in ROLLOUT_COLUMNS if column.name == "sample_id")


_ALL: Collection[str] = ()


class RangedFile(Protocol):
    """A file of which ranges can be read."""

    @property
    def name(self) -> str:
        """What it is known by; a file of the same name and footer holds the same bytes."""

    def read_end(self, most: int) -> tuple[bytes, int]:
        """Return the last `most` bytes of the file, or all of a shorter one, and the size of the file in bytes."""

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range: from its start to before its end."""


Found = TypeVar("Found", RolloutBatch, ScoreBatch, ExactBatch)


def find_rollouts(
    file: RangedFile, sample_ids: Collection[str], limits: DecodeLimits, *, only: Collection[str] = _ALL
) -> RolloutBatch | None:
    """Return the rollouts of the row groups that hold any of these sample ids; None if none does.

    `only` names the columns to read, with the required ones among them. Raises InvalidRolloutsError or
    LimitExceededError as `decode_rollouts`, for what it reads.
    """
    return _find(file, sample_ids, ROLLOUT_COLUMNS, to_batch, validate_rollouts, limits, only)


def find_scores(file: RangedFile, sample_ids: Collection[str], limits: DecodeLimits) -> ScoreBatch | None:
    """Return the scores of the row groups that hold any of these sample ids; see `find_rollouts`."""
    return _find(file, sample_ids, SCORE_COLUMNS, to_scores, validate_scores, limits)


def find_exact(file: RangedFile, sample_ids: Collection[str], limits: DecodeLimits) -> ExactBatch | None:
    """Return the divergences of the row groups that hold any of these sample ids; see `find_rollouts`."""
    return _find(file, sample_ids, EXACT_COLUMNS, to_exact, validate_exact, limits)


class RolloutFile:
    """A file of rollouts that is read a row group at a time: what is in memory has the size of one."""

    def __init__(self, file: RangedFile, limits: DecodeLimits, *, only: Collection[str] = _ALL) -> None:
        """Read the footer and all sample ids; `only` as in `find_rollouts`.

        Raises InvalidRolloutsError or LimitExceededError.
        """
        self._limits = limits
        self._columns = _those(ROLLOUT_COLUMNS, only)
        with arrow_errors():
            self._groups = _RowGroups(file, ROLLOUT_COLUMNS, limits)
            self.sample_ids: list[list[str]] = self._groups.sample_ids()

    def read(self, group: int) -> RolloutBatch:
        """Return the rollouts of a row group. Raises as `decode_rollouts`."""
        with arrow_errors():
            batch = to_batch(self._groups.read([group], self._columns))
        validate_rollouts(batch, self._limits)
        return batch


def _find(
    file: RangedFile,
    sample_ids: Collection[str],
    columns: tuple[ColumnSpec, ...],
    convert: Callable[[ColumnReader], Found],
    validate: Callable[[Found, DecodeLimits], None],
    limits: DecodeLimits,
    only: Collection[str] = _ALL,
) -> Found | None:
    wanted = frozenset(sample_ids)
    with arrow_errors():
        groups = _RowGroups(file, columns, limits)
        holding = groups.holding(wanted)
        if not holding:
            return None
        found = convert(groups.read(holding, _those(columns, only)))
    validate(found, limits)
    return None if wanted.isdisjoint(found.sample_ids) else found


def _those(columns: tuple[ColumnSpec, ...], only: Collection[str]) -> tuple[ColumnSpec, ...]:
    return tuple(column for column in columns if column.name in only) if only else columns


class _Places:
    """The row groups of a file that hold each sample id, by the hash of the id: 12 bytes each."""

    def __init__(self, names: Sequence[str], rows: Sequence[int]) -> None:
        hashes = np.array([hash(name) for name in names], dtype=np.int64)
        order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[order]
        self._groups = np.repeat(np.arange(len(rows), dtype=np.int32), rows)[order]

    def holding(self, names: Collection[str]) -> list[int]:
        """Return the numbers of the row groups that hold any of these names, or one with an equal hash."""
        asked = np.array([hash(name) for name in names], dtype=np.int64)
        first, last = (np.searchsorted(self._hashes, asked, side=side) for side in ("left", "right"))
        found = [self._groups[begin:end] for begin, end in zip(first, last, strict=True) if begin < end]
        return np.unique(np.concatenate(found)).tolist() if found else []


@dataclass(slots=True)
class _Layout:
    """What a checked footer says: the column chunks and rows of each row group, and the columns with strings.

    `places` are set once the sample ids were read, unless there are too many of them.
    """

    footer: pq.FileMetaData
    chunks: tuple[tuple[ColumnChunk, ...], ...]
    rows: tuple[int, ...]
    names: tuple[str, ...]
    strings: tuple[str, ...]
    places: _Places | None = None


def _read_layout(_name: str, end: bytes, size: int, columns: tuple[ColumnSpec, ...], limits: DecodeLimits) -> _Layout:
    """Check the footer in `end`, the last bytes of a file of so many."""
    footer, _ = read_footer(end, size, limits)
    groups = structs(footer, FILE_ROW_GROUPS)
    chunks = tuple(tuple(chunks_of({FILE_ROW_GROUPS: [group]})) for group in groups)
    check_claims(footer, [chunk for group in chunks for chunk in group], limits)
    # A footer alone is a file without pages.
    opened = pq.ParquetFile(pa.BufferReader(_MAGIC + end), **bounds_of(limits))
    schema = opened.schema_arrow
    check_schema(schema, columns)
    strings = {column.name for column in columns if column.is_string}
    return _Layout(
        opened.metadata,
        chunks,
        tuple(number(group, GROUP_ROWS) for group in groups),
        tuple(schema.names),
        tuple(name for name in schema.names if name in strings),
    )


# Reading the footer of 1,024 rollouts takes as long as reading a row group.
_remembered_layout = lru_cache(maxsize=_REMEMBERED_FILES)(_read_layout)


class _RowGroups:
    """A file whose footer is read and checked."""

    def __init__(self, file: RangedFile, columns: tuple[ColumnSpec, ...], limits: DecodeLimits) -> None:
        self._file, self._limits = file, limits
        end, size = file.read_end(_END_BYTES)
        footer_bytes = footer_bytes_of(end, limits)
        if footer_bytes > len(end):
            end, size = file.read_end(footer_bytes)
        read_layout = _remembered_layout if footer_bytes <= _END_BYTES else _read_layout
        self._layout = read_layout(file.name, end[-footer_bytes:], size, columns, limits)
        self._size, self._end = size, end

    def holding(self, sample_ids: frozenset[str]) -> list[int]:
        """Return the numbers of the row groups that hold any of the sample ids, and at times one that does not."""
        places = self._layout.places
        if places is not None:
            return places.holding(sample_ids)
        return [group for group, names in enumerate(self.sample_ids()) if not sample_ids.isdisjoint(names)]

    def sample_ids(self) -> list[list[str]]:
        """Return the sample ids of each row group."""
        names = self.read(range(len(self._layout.rows)), (_SAMPLE_ID,)).strings(_SAMPLE_ID)
        if len(names) <= _REMEMBERED_SAMPLE_IDS:
            self._layout.places = _Places(names, self._layout.rows)
        ends = list(accumulate(self._layout.rows))
        return [names[end - rows : end] for end, rows in zip(ends, self._layout.rows, strict=True)]

    def read(self, groups: Sequence[int], columns: tuple[ColumnSpec, ...]) -> ColumnReader:
        """Return these columns of the row groups, of those that the file has."""
        names = {column.name for column in columns}
        chunks = [[chunk for chunk in self._layout.chunks[group] if chunk.column in names] for group in groups]
        file = pq.ParquetFile(
            pa.PythonFile(self._fetch(chunks), "r"),
            metadata=self._layout.footer,
            read_dictionary=list(self._layout.strings),
            page_checksum_verification=True,
            **bounds_of(self._limits),
        )
        kept = [name for name in self._layout.names if name in names]
        table = file.read_row_groups(list(groups), columns=kept, use_threads=False)
        table.validate(full=True)
        return ColumnReader(table, dict(file.schema_arrow.metadata or {}), self._limits)

    def _fetch(self, groups: Sequence[Sequence[ColumnChunk]]) -> _Ranges:
        """Return the file with the pages of these chunks, a range for each row group; their headers are checked."""
        found = _Ranges(self._size)
        found.add(self._size - len(self._end), self._end)
        ranges = [
            (min(chunk.start for chunk in group), max(chunk.start + chunk.compressed_bytes for chunk in group))
            for group in groups
        ]
        for group, (start, _), data in zip(groups, ranges, self._file.read_ranges(ranges), strict=True):
            check_pages(memoryview(data), group, start)
            found.add(start, data)
        return found


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
        for first, data in self._parts:
            if first <= start and end <= first + len(data):
                self._position = max(start, end)
                return bytes(data[start - first : end - first])
        found = bytearray(max(0, end - start))
        for first, data in self._parts:
            begin, stop = max(start, first), min(end, first + len(data))
            if begin < stop:
                found[begin - start : stop - start] = data[begin - first : stop - first]
        self._position += len(found)
        return bytes(found)
