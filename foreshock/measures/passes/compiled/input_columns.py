"""The columns of a batch as bytes and a format, so that one machine code serves all types.

A column is used in place if it is contiguous and of a supported type; otherwise it is converted once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.inputs import TokenInputs
from foreshock.measures.passes.compiled import array_layout as layout
from foreshock.measures.passes.compiled.lane_state import LaneColumns

__all__ = ["DENSE_ROWS_PER_TOKEN", "BatchColumns", "batch_columns", "float_column"]

Bytes = NDArray[np.uint8]
Int64 = NDArray[np.int64]

# Largest table with a row for every id up to the maximum: no larger than the batch's log-probs and ids.
DENSE_ROWS_PER_TOKEN = 3 / 8
# Up to this size a lookup table by id is cheaper than sorting the ids.
_LOOKUP_ROWS_PER_TOKEN = 32
_NO_BYTES = np.zeros(0, np.uint8)
_NO_BYTES.flags.writeable = False
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
_INTEGERS = (np.dtype(np.int16), np.dtype(np.int32), np.dtype(np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class BatchColumns:
    """The columns of all lanes. Token ids index a table of `table_size` rows: directly, or as positions in `ids`."""

    columns: LaneColumns
    table_size: int
    ids: Int64 | None


def batch_columns(inputs: TokenInputs) -> BatchColumns:
    """Return the columns of `inputs`."""
    formats = np.zeros(layout.FORMATS, np.int64)
    target, formats[layout.TARGET_FORMAT] = float_column(inputs.target)
    behaviour, formats[layout.BEHAVIOUR_FORMAT] = float_column(inputs.behaviour)
    entropy, formats[layout.ENTROPY_FORMAT] = float_column(inputs.entropy)
    advantage, formats[layout.ADVANTAGE_FORMAT] = float_column(inputs.advantage)
    turn, formats[layout.TURN_FORMAT] = _integer_column(inputs.turn)
    lag, formats[layout.LAG_FORMAT] = _integer_column(inputs.lag)
    token_ids, table_size, ids = _table_of_ids(inputs.token_ids)
    token_ids, formats[layout.TOKEN_IDS_FORMAT] = _integer_column(token_ids)
    tokens = int(inputs.offsets[-1])
    if inputs.advantage is not None and inputs.advantage.size != tokens:
        formats[layout.ADVANTAGE_PER_ROLLOUT] = 1
    generated = _NO_BYTES
    if inputs.generated is not None:
        generated = as_bytes(np.ascontiguousarray(inputs.generated, dtype=np.bool_))
        formats[layout.MASK_FORMAT] = 1
    columns = LaneColumns(
        offsets=np.ascontiguousarray(inputs.offsets, dtype=np.int64),
        formats=formats,
        target=target,
        behaviour=behaviour,
        generated=generated,
        entropy=entropy,
        advantage=advantage,
        turn=turn,
        lag=lag,
        token_ids=token_ids,
    )
    return BatchColumns(columns, table_size, ids)


def as_bytes(values: NDArray[np.generic]) -> Bytes:
    """Return the memory of a contiguous array as read-only bytes; read-only arrays are a type of their own in numba."""
    view = values.reshape(-1).view(np.uint8)
    view.flags.writeable = False
    return view


def float_column(values: NDArray[np.floating] | None) -> tuple[Bytes, int]:
    """Return a float column's bytes and its item size in bytes; size 0 if there is no column."""
    if values is None:
        return _NO_BYTES, 0
    if values.dtype not in _FLOATS:
        values = values.astype(np.float32 if values.dtype == np.float16 else np.float64)
    return as_bytes(np.ascontiguousarray(values)), values.dtype.itemsize


def _integer_column(values: NDArray[np.integer] | None) -> tuple[Bytes, int]:
    """Return an integer column's bytes and its item size in bytes; size 0 if there is no column."""
    if values is None:
        return _NO_BYTES, 0
    if values.dtype not in _INTEGERS:
        values = values.astype(np.int64)
    return as_bytes(np.ascontiguousarray(values)), values.dtype.itemsize


def _table_of_ids(token_ids: NDArray[np.integer] | None) -> tuple[NDArray[np.integer] | None, int, Int64 | None]:
    """Return each token's row in the table, the table's size, and the id of each row (None: the row's number)."""
    if token_ids is None or token_ids.size == 0:
        return None, 0, None
    least, most = int(token_ids.min()), int(token_ids.max())
    if least >= 0 and most < token_ids.size * DENSE_ROWS_PER_TOKEN:
        return token_ids, most + 1, None
    if least >= 0 and most < token_ids.size * _LOOKUP_ROWS_PER_TOKEN:
        present = np.zeros(most + 1, np.bool_)
        present[token_ids] = True
        ids = np.flatnonzero(present)
        places = np.zeros(most + 1, np.int32)
        places[ids] = np.arange(ids.size, dtype=np.int32)
        return places[token_ids], ids.size, ids
    ids, rows = np.unique(token_ids, return_inverse=True)
    return rows, ids.size, ids.astype(np.int64)
