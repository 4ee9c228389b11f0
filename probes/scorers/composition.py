"""Batch composition: the grouping of rollouts into batches of the engine.

Floating-point sums depend on how rows are grouped and padded, so the composition is part of a score's fingerprint. The
same scorer with another composition gives its noise floor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.scorers import NOISE_FLOOR_VARIANT, VARIANTS
from probes.scorers.request import UnsupportedScoreError

__all__ = ["Composition", "compose"]


@dataclass(frozen=True, slots=True)
class Composition:
    """Batches of row indices, which contain each row exactly once; `name` describes them in a fingerprint."""

    name: str
    batches: tuple[NDArray[np.int64], ...]


def compose(lengths: NDArray[np.int64], batch_size: int, variant: str, padding: str = "") -> Composition:
    """Group rows of `lengths` tokens into batches of `batch_size` rows, in their own order.

    The variant of the noise floor sorts rows by length, longest first, and takes a quarter of the batch size (eight
    rows if the batch size is 1), so that both the neighbours and the padding of a row change.
    Raises UnsupportedScoreError for another variant.
    """
    if variant not in VARIANTS:
        raise UnsupportedScoreError(f"unknown variant {variant!r}; variants: {', '.join(map(repr, VARIANTS))}")
    order = np.arange(lengths.size, dtype=np.int64)
    name = f"{batch_size} rows in order"
    if variant == NOISE_FLOOR_VARIANT:
        order = np.argsort(-lengths, kind="stable").astype(np.int64)
        batch_size = 8 if batch_size == 1 else max(1, batch_size // 4)
        name = f"{batch_size} rows by length"
    batches = tuple(order[start : start + batch_size] for start in range(0, order.size, batch_size))
    return Composition(name=f"{name}, {padding}" if padding else name, batches=batches)
