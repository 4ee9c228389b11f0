"""What is handed over to be measured, as arrays whose types and sizes fit; what does not fit is named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import InvalidRolloutsError
from foreshock.rollouts.arrays import as_array, names_of

__all__ = ["cuts_of", "group_names", "numbers_of", "refuse_other_size"]


def numbers_of(column: str, value: Any, *, whole: bool = False) -> NDArray[Any]:
    """`value` as an array of real (or `whole`) numbers; raises InvalidRolloutsError naming `column` for others."""
    array = as_array(value, column)
    kinds, wanted = ("iub", "whole numbers") if whole else ("iubf", "real numbers")
    if array.size and array.dtype.kind not in kinds:
        raise InvalidRolloutsError(f"must hold {wanted}, not {array.dtype}", column=column)
    return array


def cuts_of(offsets: Any) -> NDArray[np.int64]:
    """[N + 1] where rollouts begin and end; raises InvalidRolloutsError where they do not rise from 0."""
    cuts = numbers_of("offsets", offsets, whole=True).astype(np.int64, copy=False)
    if cuts.ndim != 1 or cuts.size == 0 or cuts[0] != 0 or (np.diff(cuts) < 0).any():
        raise InvalidRolloutsError("offsets must rise from 0 and have N + 1 entries")
    return cuts


def refuse_other_size(column: str, array: NDArray[Any], tokens: int) -> None:
    """Raise InvalidRolloutsError naming `column` where it is not [tokens]."""
    if array.shape != (tokens,):
        raise InvalidRolloutsError(
            f"has the shape {array.shape} and must have one value for each of the {tokens} tokens", column=column
        )


def group_names(group_ids: Iterable[object] | None, rollouts: int) -> list[str | None]:
    """[N] the prompt group of each rollout, None where it has none; whole numbers are names too.

    Raises InvalidRolloutsError where there is not one a rollout.
    """
    names: list[str | None] = [None] * rollouts if group_ids is None else names_of(group_ids, "group_id")
    if len(names) != rollouts:
        raise InvalidRolloutsError(f"has {len(names)} values for {rollouts} rollouts", column="group_id")
    return names
