"""Bring log-probs of a dump to one form: natural logarithms, at most 0.

Documented formats hold log-probs, but patched trainers and conversions write probabilities or negated log-probs. The
kind is told from the values at the sampled tokens of a file:

    log-probs            none above 0, some below
    negated log-probs    none below 0, some above 1
    probabilities        all in [0, 1], at least 100 of them, most above 0.5: as negated log-probs, half of the tokens
                         would have probabilities of 0.37 to 0.6 and none a smaller one

Anything else is refused with the first value that contradicts, unless the user states the kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import InvalidRolloutsError
from foreshock.rollouts.schema import LOG_PROB_ROUNDING

__all__ = ["KINDS", "Kind", "all_zero", "kind_of", "to_log_probs"]

Kind = Literal["log_probs", "negative_log_probs", "probabilities"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_FEWEST_PROBABILITIES = 100
"""Sampled tokens from which probabilities are told from negated log-probs."""
_MINUS_INFINITY = -9999.0
"""What vLLM's server writes for a log-prob of −inf, which JSON cannot hold."""
_FEWEST_AT_THE_CLAMP = 3

Rows = Sequence[NDArray[np.float64]]
Masks = Sequence[NDArray[np.bool_]]


def all_zero(rows: Rows, sampled: Masks) -> bool:
    """Return True if every sampled token has the value 0: a placeholder for log-probs that were not computed."""
    values = _sampled(rows, sampled)
    return bool(values.size and not values.any())


def kind_of(rows: Rows, sampled: Masks, places: Sequence[str], field: str) -> Kind:
    """Return the kind of the values at the sampled tokens. Raises InvalidRolloutsError if it cannot be told.

    `rows` has one array per rollout, `sampled` its mask, `places` where it is in the dump, for the error.
    """
    values = _sampled(rows, sampled)
    values = values[np.isfinite(values)]
    if not values.size or values.max() <= LOG_PROB_ROUNDING:
        return "log_probs"
    if values.min() >= -LOG_PROB_ROUNDING:
        if values.max() > 1.0 + LOG_PROB_ROUNDING:
            return "negative_log_probs"
        if values.size >= _FEWEST_PROBABILITIES and float(np.median(values)) > 0.5:
            return "probabilities"
        problem = (
            f"{values.size} values from {values.min():.6g} to {values.max():.6g} may be probabilities or negated "
            "log-probs"
        )
    else:
        problem = f"values from {values.min():.6g} to {values.max():.6g} are neither log-probs nor probabilities"
    for row, mask, place in zip(rows, sampled, places, strict=True):
        wrong = mask & (row > LOG_PROB_ROUNDING) & np.isfinite(row)
        if wrong.any():
            token = int(wrong.argmax())
            raise InvalidRolloutsError(
                f"{place}, field `{field}`: {row[token]:.6g} at token {token} is above 0, and {problem}; expected "
                f"natural log-probs. If you know what they are, pass --log-probs {' or '.join(KINDS[1:])}"
            )
    raise AssertionError("a value above 0 was found before")


def to_log_probs(rows: Rows, sampled: Masks, kind: Kind, field: str) -> tuple[list[NDArray[np.float32]], list[str]]:
    """Return natural log-probs per rollout, 0 where no token was sampled, and remarks on conversions and clamps."""
    notes: list[str] = []
    if kind != "log_probs":
        notes.append(f"`{field}` holds {kind.replace('_', ' ')}; they were converted to log-probs")
    converted = [_converted(row, mask, kind) for row, mask in zip(rows, sampled, strict=True)]
    values = _sampled(converted, sampled)
    unlikely = int(np.count_nonzero(values == _MINUS_INFINITY))
    if unlikely:
        notes.append(f"`{field}`: {unlikely} values of −9999 stand for −inf; such tokens are counted apart")
        converted = [np.where(row == _MINUS_INFINITY, -np.inf, row) for row in converted]
        values = values[values != _MINUS_INFINITY]
    values = values[np.isfinite(values)]
    if values.size:
        least = float(values.min())
        clamped = int(np.count_nonzero(values == least))
        if least < -1 and least == round(least) and clamped >= _FEWEST_AT_THE_CLAMP:
            notes.append(
                f"`{field}`: {clamped} values are exactly {least:g}, the smallest: the trainer clamps log-probs, and "
                "the mismatch of these tokens is too small"
            )
    return [row.astype(np.float32) for row in converted], notes


def _converted(row: NDArray[np.float64], mask: NDArray[np.bool_], kind: Kind) -> NDArray[np.float64]:
    row = np.where(mask, row, 1.0 if kind == "probabilities" else 0.0)
    if kind == "probabilities":
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.log(row))
    return -row if kind == "negative_log_probs" else row


def _sampled(rows: Rows, sampled: Masks) -> NDArray[np.float64]:
    parts = [row[mask] for row, mask in zip(rows, sampled, strict=True)]
    return np.concatenate(parts) if parts else np.zeros(0)
