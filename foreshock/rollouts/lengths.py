"""The rule for a rollout whose lists differ in length: it is left out, counted and named; the others stay.

It cannot be read, and says nothing about the others. The client and the importers share the rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from foreshock.rollouts.schema import ROLLOUT_COLUMNS

_SIDE_OF = {name: column.side for column in ROLLOUT_COLUMNS for name in (column.name, column.field)}


def left_out(count: int, total: int, first: str) -> str:
    """Return the sentence about `count` of `total` rollouts; `first` is the fault of the first of them."""
    rule = "since the lists of a rollout must have equal lengths"
    return f"left out {count:,} of {total:,} rollout{'' if total == 1 else 's'}, {rule}: {first}"


def without_unequal(columns: Mapping[str, Any]) -> tuple[dict[str, Any], NDArray[np.bool_] | None, str]:
    """Return the columns without the rollouts whose lists differ in length, which rows these left, and the sentence.

    A column is a list with one list per rollout, an Arrow array of lists, or has one value per rollout. No rows (None)
    if all are kept: also if the lists of tokens are flat, if columns differ in their number of rows, or if no rollout
    would be left, which the batch then refuses.
    """
    lengths = {name: found for name, value in columns.items() if (found := _lengths(value)) is not None}
    if len({found.size for found in lengths.values()}) != 1:
        return dict(columns), None, ""
    fits, first = np.array(True), ""
    for name, found in lengths.items():
        tokens = f"{_SIDE_OF.get(name)}_token_ids"
        is_equal = found == lengths.get(tokens, found)
        if not is_equal.all() and not first:
            row = int(is_equal.argmin())
            first = f"row {row}, column `{name}`: {found[row]} values, but `{tokens}` has {lengths[tokens][row]}"
        fits = fits & is_equal
    if fits.all() or not fits.any():
        return dict(columns), None, ""
    text = left_out(int(np.count_nonzero(~fits)), fits.size, first)
    return {name: _chosen(value, fits) for name, value in columns.items()}, fits, text


def _lengths(value: Any) -> NDArray[np.int64] | None:
    """Return the lengths [N] of the lists of a column, None if it has one value per rollout."""
    if isinstance(value, pa.Array | pa.ChunkedArray):
        is_list = pa.types.is_list(value.type) or pa.types.is_large_list(value.type)
        # A null is refused when the batch is built.
        return pc.list_value_length(value).to_numpy().astype(np.int64) if is_list and not value.null_count else None
    if not isinstance(value, list | tuple):
        return None
    if not value or isinstance(value[0], str) or not hasattr(value[0], "__len__"):
        return None
    try:
        return np.array([len(row) for row in value], np.int64)
    except TypeError:
        return None


def _chosen(value: Any, fits: NDArray[np.bool_]) -> Any:
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return value.filter(pa.array(fits))
    if isinstance(value, Sequence):
        return [row for row, is_kept in zip(value, fits.tolist(), strict=True) if is_kept]
    return value[fits] if len(value) == fits.size else value
