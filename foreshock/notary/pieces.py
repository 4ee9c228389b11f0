"""Pieces of tensors with their digests, and the tensors that they make up: integers only, no framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

# Both are 5 mod 8, so their powers repeat only after 2⁶².
ROW_FACTOR, COLUMN_FACTOR = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
MODULUS = 1 << 64


class Piece(NamedTuple):
    """A part of a tensor: `digest` as if it were the whole, its size and place in rows and 32-bit words of a row.

    `rank` is the process that holds it, such as the tensor-parallel rank.
    """

    dtype: str
    digest: int
    rows: int
    columns: int
    row: int = 0
    column: int = 0
    rank: int = 0


Tensors = Mapping[str, list[Piece]]
"""The pieces of each tensor, by the name that it has in the checkpoint."""


class Whole(NamedTuple):
    """A tensor: its dtype, digest, rows and 32-bit words per row; equal tensors compare equal."""

    dtype: str
    digest: int
    rows: int
    columns: int


def joined(reports: Iterable[Tensors]) -> dict[str, list[Piece]]:
    """Return the pieces of several ranks together: of an engine's workers, or of a trainer's (`all_gather_object`)."""
    pieces: dict[str, list[Piece]] = {}
    for report in reports:
        for name, of_rank in report.items():
            pieces.setdefault(name, []).extend(of_rank)
    return pieces


def whole_of(pieces: Sequence[Piece]) -> Whole | None:
    """Return the tensor that pieces make up; None unless they have one dtype, agree and leave nothing out."""
    placed: dict[tuple[int, int], Piece] = {}
    rows = columns = size = 0
    for piece in pieces:
        same = placed.setdefault((piece.row, piece.column), piece)
        if same is piece:
            size += piece.rows * piece.columns
            rows, columns = max(rows, piece.row + piece.rows), max(columns, piece.column + piece.columns)
        elif same[:4] != piece[:4]:
            return None
        if piece.dtype != pieces[0].dtype:
            return None
    if size != rows * columns:
        return None
    return Whole(pieces[0].dtype, digest_of((piece, place) for place, piece in placed.items()), rows, columns)


def digest_of(placed: Iterable[tuple[Piece, tuple[int, int]]]) -> int:
    """Return the digest of a tensor from its pieces, each with its place: row, and word of the row."""
    return sum(piece.digest * factor_of(place) for piece, place in placed) % MODULUS


@lru_cache(maxsize=10_000)
def factor_of(place: tuple[int, int]) -> int:
    """Return the factor of a piece's digest at a place in the tensor: row, and word of the row."""
    return pow(ROW_FACTOR, place[0], MODULUS) * pow(COLUMN_FACTOR, place[1], MODULUS) % MODULUS
