"""Inputs of the measures as arrays with checked types and sizes, and columns that are derived from a batch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.errors import InvalidRolloutsError
from foreshock.rollouts.arrays import as_array, names_of, row_sums
from foreshock.rollouts.batch import RolloutBatch


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """The tokens of N rollouts: [T] arrays cut by `offsets` [N + 1]. `generated` is False for tool output.

    `advantage` is [T], or [N] for one number per rollout if N ≠ T. None means that a column was not logged.
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
    """Return the inputs of a comparison as checked arrays; raises InvalidRolloutsError if types or sizes do not fit.

    `advantage` is [T], or [N] for one number per rollout; if N = T it is read as [T].
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
        check_size(name, array, int(cuts[-1]))
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
    """Return `value` as an array of numbers, or integers if `whole`; raises InvalidRolloutsError naming `column`."""
    array = as_array(value, column)
    kinds, expected = ("iub", "integers") if whole else ("iubf", "real numbers")
    if array.size and array.dtype.kind not in kinds:
        raise InvalidRolloutsError(f"must hold {expected}, got {array.dtype}", column=column)
    return array


def cuts_of(offsets: Any) -> NDArray[np.int64]:
    """Return `offsets` [N + 1] of rollouts; raises InvalidRolloutsError unless they start at 0 and never fall."""
    cuts = numbers_of("offsets", offsets, whole=True).astype(np.int64, copy=False)
    if cuts.ndim != 1 or cuts.size == 0 or cuts[0] != 0 or (np.diff(cuts) < 0).any():
        shown = f"shape {cuts.shape}, {np.array2string(cuts.ravel(), threshold=6, edgeitems=3)}"
        raise InvalidRolloutsError(f"offsets must rise from 0 and have N + 1 entries, got {shown}")
    return cuts


def check_size(column: str, array: NDArray[Any], tokens: int) -> None:
    """Raise InvalidRolloutsError naming `column` if its shape is not [tokens]."""
    if array.shape != (tokens,):
        raise InvalidRolloutsError(
            f"must have one value for each of the {tokens} tokens, got the shape {array.shape}", column=column
        )


def generated_tokens(mask: ArrayLike | None, tokens: int) -> NDArray[np.bool_]:
    """Return whether the model sampled each token, [tokens]; `mask` None: all. Raises InvalidRolloutsError."""
    generated = np.ones(tokens, np.bool_) if mask is None else numbers_of("response_mask", mask) != 0
    check_size("response_mask", generated, tokens)
    return generated


def group_names(group_ids: Iterable[object] | None, rollouts: int) -> list[str | None]:
    """Return the prompt group of each rollout, [N], None if it has none; integers are valid names.

    Raises InvalidRolloutsError if the number of ids is not N.
    """
    names: list[str | None] = [None] * rollouts if group_ids is None else names_of(group_ids, "group_id")
    if len(names) != rollouts:
        raise InvalidRolloutsError(
            f"must have one value for each of the {rollouts} rollouts, got {len(names)}", column="group_id"
        )
    return names


def truncated_rollouts(batch: RolloutBatch) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return whether each rollout was truncated, [N], and whether that is known, [N].

    A rollout is truncated if its finish reason is `length`, or, without a reason, if it is as long as the batch's cap.
    """
    reasons = batch.finish_reasons or [None] * batch.num_rollouts
    known = np.array([reason is not None for reason in reasons], dtype=np.bool_)
    truncated = np.array([reason == "length" for reason in reasons], dtype=np.bool_)
    cap = batch.attributes.length_cap
    if cap is None:
        return truncated, known
    return truncated | (~known & (batch.response_lengths >= cap)), np.ones_like(known)


def turns_of_rollouts(batch: RolloutBatch) -> NDArray[np.int64]:
    """Return the number of turns in which the model sampled, [N]. Raises ValueError if `turn` was not logged."""
    if batch.turn is None:
        raise ValueError("turns_of_rollouts needs the column `turn`, which this batch does not have")
    generated = np.flatnonzero(batch.generated)
    rows = np.repeat(np.arange(batch.num_rollouts), batch.generated_lengths)
    turn = batch.turn[generated]
    begins = np.ones(turn.size, dtype=np.bool_)
    begins[1:] = (turn[1:] != turn[:-1]) | (rows[1:] != rows[:-1])
    return np.bincount(rows[begins], minlength=batch.num_rollouts).astype(np.int64)


def lag_of_tokens(batch: RolloutBatch) -> NDArray[np.integer] | None:
    """Return trainer weights version − the version that sampled, [T]; None if either is unknown."""
    versions, trained = batch.weights_version, batch.attributes.trainer_weights_version
    if versions is None or trained is None:
        return None
    # The difference of two non-negative int32 fits int32, in half the memory.
    fits = 0 <= trained <= np.iinfo(np.int32).max and versions.dtype == np.int32 and versions.min(initial=0) >= 0
    return np.subtract(trained, versions, dtype=np.int32 if fits else np.int64)


def generated_means(batch: RolloutBatch, values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the mean of [T] values over each rollout's generated tokens, [N]; NaN if it has none."""
    generated = batch.generated
    if generated.all():
        totals = row_sums(values, batch.response_offsets)
    else:
        rows = np.repeat(np.arange(batch.num_rollouts), batch.generated_lengths)
        weights = values[generated].astype(np.float64)
        totals = np.bincount(rows, weights, batch.num_rollouts).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return totals / batch.generated_lengths
