"""What is handed over to be measured, as arrays whose types and sizes fit; what does not fit is named."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.errors import InvalidRolloutsError
from foreshock.rollouts.arrays import as_array, names_of

__all__ = ["TokenInputs", "cuts_of", "group_names", "numbers_of", "refuse_other_size", "token_inputs"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """The tokens of N rollouts: [T] arrays cut by `offsets` [N + 1]. `generated` is False for tool output.

    `advantage` is [T], or [N] where it is one number a rollout and N is not T. What is None was not logged.
    """

    target: NDArray[np.floating]
    behaviour: NDArray[np.floating]
    offsets: NDArray[np.int64]
    generated: NDArray[np.bool_] | None = None
    entropy: NDArray[np.floating] | None = None
    turn: NDArray[np.integer] | None = None
    lag: NDArray[np.integer] | None = None
    token_ids: NDArray[np.integer] | None = None
    advantage: NDArray[np.floating] | None = None


def token_inputs(
    target: ArrayLike,
    behaviour: ArrayLike,
    offsets: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    entropy: ArrayLike | None = None,
    turn: ArrayLike | None = None,
    lag: ArrayLike | None = None,
    token_ids: ArrayLike | None = None,
    advantage: ArrayLike | None = None,
) -> TokenInputs:
    """The inputs of a comparison as arrays whose types and sizes fit; raises InvalidRolloutsError where they do not.

    `advantage` is [T], or [N] for one number a rollout; where N = T it is [T].
    """
    cuts = cuts_of(offsets)
    given = {"target": target, "behaviour": behaviour, "response_mask": mask, "entropy": entropy}
    whole = {"turn": turn, "lag": lag, "response_token_ids": token_ids}
    arrays = {name: numbers_of(name, value) for name, value in given.items() if value is not None}
    arrays |= {name: numbers_of(name, value, whole=True) for name, value in whole.items() if value is not None}
    advantages = None if advantage is None else numbers_of("advantage", advantage)
    if advantages is not None and advantages.shape != (cuts.size - 1,):
        arrays["advantage"] = advantages
    for name, array in arrays.items():
        refuse_other_size(name, array, int(cuts[-1]))
    return TokenInputs(
        target=arrays["target"],
        behaviour=arrays["behaviour"],
        offsets=cuts,
        generated=arrays["response_mask"] != 0 if "response_mask" in arrays else None,
        entropy=arrays.get("entropy"),
        turn=arrays.get("turn"),
        lag=arrays.get("lag"),
        token_ids=arrays.get("response_token_ids"),
        advantage=advantages,
    )


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
