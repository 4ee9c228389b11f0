"""Convert arrays and strings to Arrow arrays from their buffers.

`pyarrow.array` imports pandas if it is installed: half a second in which a trainer's threads wait for imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

__all__ = ["list_array", "number_array", "string_array"]


def number_array(values: NDArray[Any], *, missing: NDArray[np.bool_] | None = None) -> pa.Array:
    """Return numbers [N] as an Arrow array of the same type that shares their memory; null where `missing` [N]."""
    values = np.ascontiguousarray(values)
    arrow_type = getattr(pa, values.dtype.name)()
    return pa.Array.from_buffers(arrow_type, values.size, [_bitmap(missing), pa.py_buffer(values)])


def string_array(values: Sequence[str | None]) -> pa.Array:
    """Return N strings as an Arrow array; None is null."""
    texts = [b"" if value is None else value.encode() for value in values]
    offsets = np.zeros(len(texts) + 1, np.int32)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    missing = np.fromiter((value is None for value in values), np.bool_, len(texts))
    buffers = [_bitmap(missing), pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(pa.string(), len(texts), buffers)


def list_array(values: NDArray[Any], offsets: NDArray[np.int64], arrow_type: pa.DataType) -> pa.Array:
    """Return flat values [T], cut at `offsets` [N + 1], as N Arrow lists of `arrow_type`."""
    return pa.ListArray.from_arrays(number_array(offsets.astype(np.int32)), number_array(values), type=arrow_type)


def _bitmap(missing: NDArray[np.bool_] | None) -> pa.Buffer | None:
    """Return Arrow's bitmap of valid values, None if all are."""
    if missing is None or not missing.any():
        return None
    return pa.py_buffer(np.packbits(~missing, bitorder="little"))
