"""Rollouts that an importer reads one at a time, and the batch that is made of them.

Log-probs are natural logarithms, at most 0. A value above 0 at a sampled token is refused with its place.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from foreshock.errors import InvalidRolloutsError
from foreshock.importers.dumps import refusal
from foreshock.rollouts.attributes import BatchAttributes
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.lengths import left_out
from foreshock.rollouts.schema import LOG_PROB_ROUNDING

Sample = TypeVar("Sample")
_MAY_BE_NONE = ("group_ids", "finish_reasons", "data_sources", "engine_ids")
_LOG_PROBS = ("rollout_log_probs", "trainer_log_probs")
_MINUS_INFINITY = -9999.0
"""What vLLM's server writes for a log-prob of −inf, which JSON cannot hold."""
_FEWEST_AT_THE_CLAMP = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout. `place` says where it is in the dump; `columns` are fields of RolloutBatch, None if not logged."""

    place: str
    sample_id: str
    prompt: NDArray[np.int64]
    response: NDArray[np.int64]
    sampled: NDArray[np.bool_]
    columns: dict[str, Any]


def make_batch(
    rows: Sequence[Row], attributes: BatchAttributes, switched_on_by: dict[str, str], names: dict[str, str]
) -> tuple[RolloutBatch, list[str]]:
    """Return the validated batch of one shard, and remarks.

    For the columns of log-probs, `switched_on_by` says which option of the framework logs them, and `names` has the
    dump's own names. Raises RolloutsError naming the place of the rollout.
    """
    notes: list[str] = []
    columns: dict[str, Any] = {"response_mask": [row.sampled.astype(np.uint8) for row in rows]}
    for name in sorted({name for row in rows for name in row.columns}):
        values = [row.columns.get(name) for row in rows]
        if name not in _LOG_PROBS:
            if all(value is not None for value in values) or name in _MAY_BE_NONE:
                columns[name] = values
            elif name == "reward" and any(value is not None for value in values):
                columns[name] = [np.nan if value is None else value for value in values]
            continue
        log_probs, remarks = log_probs_of(rows, name, names[name])
        notes += remarks
        if log_probs is not None:
            columns[name] = log_probs
    for name in _LOG_PROBS:
        if name not in columns:
            notes.append(f"no {_LETTER[name]}: {switched_on_by[name]}")
    sample_ids = [row.sample_id for row in rows]
    prompts: list[Any] = [row.prompt for row in rows]
    responses: list[Any] = [row.response for row in rows]
    try:
        batch = RolloutBatch.from_lists(sample_ids, prompts, responses, attributes=attributes, **columns)
    except InvalidRolloutsError as error:
        if error.row is None or error.row >= len(rows):
            raise
        raise refusal(rows[error.row].place, error.column, error.message) from error
    return batch, notes


_LETTER = {"rollout_log_probs": "μ (rollout log-probs)", "trainer_log_probs": "π (trainer log-probs)"}


def log_probs_of(rows: Sequence[Row], name: str, field: str) -> tuple[list[NDArray[np.float32]] | None, list[str]]:
    """Return a column of log-probs, 0 where no token was sampled, and remarks; None if no rollout has any.

    `field` is the dump's own name. Raises InvalidRolloutsError for the first sampled token whose value is above 0.
    """
    notes: list[str] = []
    lacking = [row for row in rows if row.columns.get(name) is None and row.sampled.any()]
    if len(lacking) == sum(bool(row.sampled.any()) for row in rows):
        return None, notes
    if lacking:
        notes.append(f"`{field}` is missing in {len(lacking)} rollouts, first in {lacking[0].place}: they count as NaN")
    given = [(row.columns.get(name), row.sampled.size) for row in rows]
    values = np.concatenate([np.full(size, np.nan) if value is None else value for value, size in given])
    sampled, ends = np.concatenate([row.sampled for row in rows]), np.cumsum([size for _, size in given])
    values = np.where(sampled, values, 0.0)
    if not values.any():
        return None, [*notes, f"`{field}` is 0 at every token, a placeholder: it was left out"]
    wrong = np.flatnonzero((values > LOG_PROB_ROUNDING) & np.isfinite(values))
    if wrong.size:
        row = int(np.searchsorted(ends, wrong[0], "right"))
        token = wrong[0] - ends[row] + given[row][1]
        problem = f"{values[wrong[0]]:.6g} at token {token} is above 0; expected natural log-probs"
        raise refusal(rows[row].place, field, problem)
    unlikely = values == _MINUS_INFINITY
    if unlikely.any():
        notes.append(f"`{field}`: {unlikely.sum()} values of −9999 stand for −inf; such tokens are counted apart")
        values[unlikely] = -np.inf
    known = values[sampled & np.isfinite(values)]
    least = float(known.min(initial=0.0))
    clamped = int(np.count_nonzero(known == least))
    if least < -1 and least == round(least) and clamped >= _FEWEST_AT_THE_CLAMP:
        notes.append(
            f"`{field}`: {clamped} values are exactly {least:g}, the smallest: the trainer clamps log-probs, and the "
            "mismatch of these tokens is too small"
        )
    return np.split(values.astype(np.float32), ends[:-1]), notes


class WrongLength(InvalidRolloutsError):
    """A rollout whose lists differ in length (`foreshock.rollouts.lengths`)."""


def rows_of(samples: Iterable[Sample], make: Callable[[Sample], Row]) -> tuple[list[Row], list[tuple[int, str]]]:
    """Return the rows of samples, without those whose lists differ in length; the number of these with a sentence.

    Raises the error of the first one if none is left.
    """
    rows: list[Row] = []
    refused: list[WrongLength] = []
    for sample in samples:
        try:
            rows.append(make(sample))
        except WrongLength as error:
            refused.append(error)
    if refused and not rows:
        raise refused[0]
    count = len(refused)
    return rows, [(count, left_out(count, len(rows) + count, str(refused[0])))] if refused else []


def prompt_group(prompt: NDArray[np.int64]) -> str:
    """Return a name for all rollouts of one prompt, for formats without prompt groups."""
    return "prompt-" + hashlib.sha256(prompt.astype("<i8").tobytes()).hexdigest()[:16]


def integers(value: Any, place: str, field: str) -> NDArray[np.int64]:
    """Return a list of whole numbers as an array. Raises InvalidRolloutsError for anything else."""
    array = _array(value, place, field, None)
    if array.size and array.dtype.kind not in "iu":
        raise refusal(place, field, f"expected a list of whole numbers, got {_shown(value)}")
    return array.astype(np.int64)


def floats(value: Any, place: str, field: str, length: int | None = None) -> NDArray[np.float64]:
    """Return a list of numbers as an array, null as NaN. Raises InvalidRolloutsError for anything else."""
    array = _array(value, place, field, length)
    if array.dtype == object and all(item is None or _is_number(item) for item in array):
        array = np.array([np.nan if item is None else item for item in array], np.float64)
    if array.size and array.dtype.kind not in "iuf":
        raise refusal(place, field, f"expected a list of numbers, got {_shown(value)}")
    return array.astype(np.float64)


def mask(value: Any, place: str, field: str, length: int | None = None) -> NDArray[np.bool_]:
    """Return a list of booleans, or of 0 and 1, as a mask. Raises InvalidRolloutsError for other values."""
    array = _array(value, place, field, length)
    if array.size and (array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all()):
        raise refusal(place, field, f"expected a list of 0 and 1, got {_shown(value)}")
    return array.astype(np.bool_)


def number(value: Any, place: str, field: str) -> float | None:
    """Return a number, or None for null. Raises InvalidRolloutsError for anything else."""
    if value is None:
        return None
    if not _is_number(value):
        raise refusal(place, field, f"expected a number or null, got {_shown(value)}")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) > sys.float_info.max


def _array(value: Any, place: str, field: str, length: int | None) -> NDArray[Any]:
    if not isinstance(value, list | np.ndarray):
        raise refusal(place, field, f"expected a list, got {_shown(value)}")
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise refusal(place, field, f"expected a flat list of numbers, got {_shown(value)}") from error
    if array.ndim != 1:
        raise refusal(place, field, f"expected a flat list of numbers, got {array.ndim} dimensions")
    if length is not None and array.size != length:
        raise WrongLength(str(refusal(place, field, f"expected {length} values, one per token, got {array.size}")))
    return array


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
