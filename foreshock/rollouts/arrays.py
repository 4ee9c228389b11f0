"""Convert what frameworks hold (lists, numpy arrays, torch tensors) to numpy arrays and lists of strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import InvalidRolloutsError

__all__ = ["as_array", "names_of"]


def as_array(value: Any, column: str) -> NDArray[Any]:
    """Return `value` as a numpy array, without a copy if memory can be shared.

    Accepts what `np.asarray` accepts and any dense torch tensor: on a device (copied to the CPU), part of a graph
    (detached), or of a type that numpy lacks, such as bfloat16 (converted to float32, which is exact). Torch is not
    imported. Raises InvalidRolloutsError naming `column` if the value is not an array.
    """
    try:
        return _of_tensor(value.detach().cpu()) if hasattr(value, "detach") else np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRolloutsError(f"is not an array: {error}", column=column) from error


def names_of(values: Any, column: str) -> list[str | None]:
    """Return names of rollouts or groups as strings; whole numbers are converted, None is kept.

    Raises InvalidRolloutsError naming row and `column` for any other value.
    """
    if not isinstance(values, Sequence):
        values = as_array(values, column).tolist()
    return [_name(value, row, column) for row, value in enumerate(values)]


def _name(value: Any, row: int, column: str) -> str | None:
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(value)
    if value is not None and not isinstance(value, str):
        raise InvalidRolloutsError(f"must be a string, not {type(value).__name__}", row=row, column=column)
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise InvalidRolloutsError(f"cannot be encoded as UTF-8: {error}", row=row, column=column) from error
    return value


def _of_tensor(tensor: Any) -> NDArray[Any]:
    try:
        return np.asarray(tensor.numpy())
    except TypeError:
        return np.asarray(tensor.float().numpy())
