"""Batch composition: the grouping of rollouts into batches of the engine.

Floating-point sums depend on how rows are grouped and padded, so the composition is part of a score's fingerprint. The
same scorer with another composition gives its noise floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.scorers import NOISE_FLOOR_VARIANT, VARIANTS
from foreshock_probes.scorers.request import UnsupportedScoreError

__all__ = ["Composition", "compose", "compose_by_length"]

# The largest share of padding in a batch by length.
MOST_PADDING = 0.05


@dataclass(frozen=True, slots=True)
class Composition:
    """Batches of row indices, which contain each row exactly once; `name` describes them in a fingerprint."""

    name: str
    batches: tuple[NDArray[np.int64], ...]


def compose(
    lengths: NDArray[np.int64],
    batch_size: int,
    variant: str,
    padding: str = "",
    batch_tokens: int | None = None,
    *,
    packed: bool = False,
) -> Composition:
    """Group rows of `lengths` tokens into batches of at most `batch_size` rows, in their own order.

    With `batch_tokens`, a batch also has at most so many tokens, padding included; a longer row is a batch of its own.
    `packed`: the rows of a batch have no padding. The variant of the noise floor sorts rows by length, longest first,
    and takes a quarter of the batch size (eight rows if the batch size is 1), so that both the neighbours and the
    padding of a row change. Raises UnsupportedScoreError for another variant.
    """
    _check_variant(variant)
    order, name = np.arange(lengths.size, dtype=np.int64), "in order"
    if variant == NOISE_FLOOR_VARIANT:
        order, name = np.argsort(-lengths, kind="stable").astype(np.int64), "by length"
        batch_size = 8 if batch_size == 1 else max(1, batch_size // 4)
    bounds = f"{batch_size} rows" if batch_tokens is None else f"up to {batch_size} rows or {batch_tokens} tokens"
    batches = _cut(order, lengths, batch_size, math.inf if batch_tokens is None else batch_tokens, 1.0, packed)
    return _named(f"{bounds} {name}", padding, batches)


def compose_by_length(
    lengths: NDArray[np.int64],
    batch_size: int,
    batch_tokens: int,
    variant: str,
    padding: str = "",
    *,
    packed: bool = False,
) -> Composition:
    """Group rows of similar length: at most `batch_size` rows and `batch_tokens` tokens, at most 5 % of them padding.

    A row longer than `batch_tokens` is a batch of its own. `packed`: the rows of a batch have no padding. The variant
    of the noise floor starts with the shortest row and takes a quarter of the rows of the largest plain batch, so that
    neighbours and padding change; if every batch has one row, it takes up to eight rows whatever their lengths.
    Raises UnsupportedScoreError for another variant.
    """
    _check_variant(variant)
    order = np.argsort(-lengths, kind="stable").astype(np.int64)
    batches = _cut(order, lengths, batch_size, batch_tokens, MOST_PADDING, packed)
    name = f"by length, up to {batch_size} rows or {batch_tokens} tokens"
    if variant == NOISE_FLOOR_VARIANT:
        largest = max((batch.size for batch in batches), default=1)
        rows, most_padding = (8, 1.0) if largest == 1 else (max(1, largest // 4), MOST_PADDING)
        batches = _cut(order[::-1], lengths, rows, batch_tokens, most_padding, packed)
        name = f"by length from the shortest, up to {rows} rows or {batch_tokens} tokens"
    return _named(name, padding, batches)


def _named(name: str, padding: str, batches: tuple[NDArray[np.int64], ...]) -> Composition:
    return Composition(name=f"{name}, {padding}" if padding else name, batches=batches)


def _cut(
    order: NDArray[np.int64],
    lengths: NDArray[np.int64],
    rows: int,
    tokens: float,
    most_padding: float,
    packed: bool,
) -> tuple[NDArray[np.int64], ...]:
    """Cut `order` before each row that a batch has no room for."""
    cuts, start, real, width = [], 0, 0, 0
    for index, row in enumerate(order.tolist()):
        length = int(lengths[row])
        wide = max(width, length)
        padded = real + length if packed else wide * (index - start + 1)
        full = index - start == rows or padded > tokens or padded - real - length > most_padding * padded
        if index > start and full:
            cuts.append(index)
            start, real, wide = index, 0, length
        real, width = real + length, wide
    return tuple(part.copy() for part in np.split(order, cuts) if part.size)


def _check_variant(variant: str) -> None:
    if variant not in VARIANTS:
        raise UnsupportedScoreError(f"unknown variant {variant!r}; variants: {', '.join(map(repr, VARIANTS))}")
