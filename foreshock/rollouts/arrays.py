"""Whatever a framework holds as a numpy array: lists, numpy's own, tensors of torch in any of their states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import InvalidRolloutsError

__all__ = ["as_array", "names_of"]


def as_array(value: Any, column: str) -> NDArray[Any]:
    """`value` as numpy holds it, in the same memory where that can be shared.

    Besides what `np.asarray` takes, that is any dense torch tensor: on a device (it is copied to the CPU), part of a
    graph (its gradient is left out), or of a type that numpy lacks, such as bfloat16 (it becomes float32, exactly).
    Torch is not imported. Raises InvalidRolloutsError naming `column` for what is no array.
    """
    try:
        return _of_tensor(value.detach().cpu()) if hasattr(value, "detach") else np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRolloutsError(f"is no array: {error}", column=column) from error


def names_of(values: Any, column: str) -> list[str | None]:
    """Names of rollouts or groups as strings: whole numbers are names too, None is kept.

    Raises InvalidRolloutsError naming row and `column` where something is neither.
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
        raise InvalidRolloutsError(f"is no text that UTF-8 can hold: {error}", row=row, column=column) from error
    return value


def _of_tensor(tensor: Any) -> NDArray[Any]:
    try:
        return np.asarray(tensor.numpy())
    except TypeError:
        return np.asarray(tensor.float().numpy())
