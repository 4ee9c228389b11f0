"""A batch of rollouts in memory: flat numpy arrays and offsets, one field per column of the schema."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.errors import InvalidRolloutsError
from foreshock.rollouts.arrays import (
    Padding,
    as_array,
    concatenate_offsets,
    flat_columns,
    lengths_of_offsets,
    mask_of,
    names_of,
    offsets_of_lengths,
    refuse_cell,
    row_counts,
    take_rows,
)
from foreshock.rollouts.attributes import BatchAttributes
from foreshock.rollouts.schema import ROLLOUT_COLUMNS, ColumnSpec
from foreshock.rollouts.validation import validate_rollouts

_COLUMN_OF_FIELD = {column.field: column for column in ROLLOUT_COLUMNS}


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """N rollouts with T response tokens and P prompt tokens in total, as flat values and offsets, without padding.

    The tokens of rollout i are `response_token_ids[response_offsets[i]:response_offsets[i + 1]]`; every [T] field is
    cut the same way. A field is None if it was not logged. Missing numbers of a rollout are NaN, missing strings None.
    The constructor does not validate; `from_arrays`, `from_lists`, `from_padded` and `decode_rollouts` do.
    """

    sample_ids: list[str]  # [N], unique in the batch
    prompt_token_ids: NDArray[np.int32]  # [P]
    prompt_offsets: NDArray[np.int64]  # [N + 1]
    response_token_ids: NDArray[np.int32]  # [T]
    response_offsets: NDArray[np.int64]  # [N + 1]
    rollout_log_probs: NDArray[np.float32] | None = None  # [T], log μ
    trainer_log_probs: NDArray[np.float32] | None = None  # [T], log π
    response_mask: NDArray[np.uint8] | None = None  # [T], 0: not sampled by the model
    entropy: NDArray[np.float32] | None = None  # [T], nats
    turn: NDArray[np.int16] | None = None  # [T]
    weights_version: NDArray[np.int32] | None = None  # [T]
    group_ids: list[str | None] | None = None  # [N]
    data_sources: list[str | None] | None = None  # [N]
    engine_ids: list[str | None] | None = None  # [N]
    reward: NDArray[np.float32] | None = None  # [N]
    advantage: NDArray[np.float32] | None = None  # [T] if advantage_per_token, else [N]
    finish_reasons: list[str | None] | None = None  # [N]
    temperature: NDArray[np.float32] | None = None  # [N]
    top_p: NDArray[np.float32] | None = None  # [N]
    top_k: NDArray[np.int32] | None = None  # [N], -1: all
    min_p: NDArray[np.float32] | None = None  # [N]
    attributes: BatchAttributes = field(default_factory=BatchAttributes)
    advantage_per_token: bool = False

    @property
    def num_rollouts(self) -> int:
        """N."""
        return len(self.sample_ids)

    @property
    def num_tokens(self) -> int:
        """T, the response tokens of all rollouts, tool output included."""
        return int(self.response_offsets[-1])

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """[N] response tokens per rollout, tool output included."""
        return lengths_of_offsets(self.response_offsets)

    @property
    def generated(self) -> NDArray[np.bool_]:
        """[T] True for a token that the model sampled; measures are taken over these."""
        if self.response_mask is None:
            return np.ones(self.num_tokens, dtype=np.bool_)
        return np.asarray(self.response_mask != 0, dtype=np.bool_)

    @property
    def generated_lengths(self) -> NDArray[np.int64]:
        """[N] model-generated tokens per rollout, the length that length statistics use."""
        if self.response_mask is None:
            return self.response_lengths
        return row_counts(self.generated, self.response_offsets)

    def offsets_of(self, column: ColumnSpec) -> NDArray[np.int64] | None:
        """Return the offsets [N + 1] that cut `column` in this batch; None if it has one value per rollout."""
        if column.side is None or (column.level == "rollout or response token" and not self.advantage_per_token):
            return None
        return self.prompt_offsets if column.side == "prompt" else self.response_offsets

    def select(self, indices: ArrayLike) -> RolloutBatch:
        """Return the rollouts at `indices` (integers, or a boolean mask [N]), in that order. Raises IndexError."""
        chosen = np.asarray(indices)
        # numpy gives an empty list the dtype float64.
        rows = np.arange(self.num_rollouts)[chosen if chosen.size else chosen.astype(np.int64)]
        prompt_positions, prompt_offsets = take_rows(self.prompt_offsets, rows)
        response_positions, response_offsets = take_rows(self.response_offsets, rows)
        values: dict[str, Any] = {}
        for column in ROLLOUT_COLUMNS:
            value = getattr(self, column.field)
            if isinstance(value, list):
                value = [value[row] for row in rows.tolist()]
            elif value is not None and self.offsets_of(column) is None:
                value = value[rows]
            elif value is not None:
                value = value[prompt_positions if column.side == "prompt" else response_positions]
            values[column.field] = value
        return RolloutBatch(
            **values,
            prompt_offsets=prompt_offsets,
            response_offsets=response_offsets,
            attributes=self.attributes,
            advantage_per_token=self.advantage_per_token,
        )

    @classmethod
    def from_arrays(
        cls,
        sample_ids: Iterable[object],
        prompt_token_ids: ArrayLike,
        prompt_offsets: ArrayLike,
        response_token_ids: ArrayLike,
        response_offsets: ArrayLike,
        *,
        attributes: BatchAttributes | None = None,
        check_values: bool = True,
        **columns: Any,
    ) -> RolloutBatch:
        """Return a validated batch of flat arrays (lists, numpy arrays, torch tensors; see `as_array`) and offsets.

        `columns` are the other fields of RolloutBatch by name. Whole numbers are accepted for strings. `advantage` is
        per token if its size is T and not N. With `check_values=False` only shapes are validated. Raises
        InvalidRolloutsError naming row and column.
        """
        columns |= {"prompt_token_ids": prompt_token_ids, "response_token_ids": response_token_ids}
        per_token = columns.pop("advantage_per_token", None)
        values: dict[str, Any] = {"sample_ids": names_of(sample_ids, "sample_id")}
        for name, value in columns.items():
            if name not in _COLUMN_OF_FIELD:
                known = ", ".join(_COLUMN_OF_FIELD)
                raise InvalidRolloutsError(f"unknown field of RolloutBatch; fields: {known}", column=name)
            values[name] = _as_field(_COLUMN_OF_FIELD[name], value)
        values["prompt_offsets"] = _as_offsets("prompt_token_ids", prompt_offsets)
        values["response_offsets"] = _as_offsets("response_token_ids", response_offsets)
        if per_token is None:
            advantage = values.get("advantage")
            per_token = advantage is not None and advantage.size != len(values["sample_ids"])
        batch = cls(**values, attributes=attributes or BatchAttributes(), advantage_per_token=per_token)
        validate_rollouts(batch, check_values=check_values)
        return batch

    @classmethod
    def from_lists(
        cls,
        sample_ids: Iterable[object],
        prompt_token_ids: Sequence[Sequence[int]],
        response_token_ids: Sequence[Sequence[int]],
        *,
        attributes: BatchAttributes | None = None,
        check_values: bool = True,
        **columns: Any,
    ) -> RolloutBatch:
        """Return a validated batch of one list per rollout and column. Raises InvalidRolloutsError."""
        rows = {"prompt_token_ids": prompt_token_ids, "response_token_ids": response_token_ids, **columns}
        lengths = {
            side: [_length(f"{side}_token_ids", row, value) for row, value in enumerate(rows[f"{side}_token_ids"])]
            for side in ("prompt", "response")
        }
        flat: dict[str, Any] = {}
        for name, value in rows.items():
            column = _COLUMN_OF_FIELD.get(name)
            side = column.side if column is not None else None
            if column is not None and column.level == "rollout or response token" and value is not None and len(value):
                flat["advantage_per_token"] = np.ndim(value[0]) == 1
                side = side if flat["advantage_per_token"] else None
            if value is not None and side is not None:
                value = _flatten(name, value, lengths[side], f"{side}_token_ids")
            if value is not None:
                flat[name] = value
        return cls.from_arrays(
            sample_ids,
            prompt_offsets=offsets_of_lengths(lengths["prompt"]),
            response_offsets=offsets_of_lengths(lengths["response"]),
            attributes=attributes,
            check_values=check_values,
            **flat,
        )

    @classmethod
    def from_padded(
        cls,
        response_token_ids: Any,
        response_mask: Any,
        *,
        response_padding_mask: Any = None,
        prompt_token_ids: Any = None,
        prompt_padding_mask: Any = None,
        sample_ids: Iterable[object] | None = None,
        attributes: BatchAttributes | None = None,
        check_values: bool = True,
        **columns: Any,
    ) -> RolloutBatch:
        """Return a validated batch of padded arrays: [N, L] for responses, [N, P] for prompts.

        `response_mask` is 1 for a token that the model sampled. A response extends from its first 1 to its last; either
        side may be padded, and a 0 in between is a token that the model did not sample. If a response begins or ends
        with tool output or has padding inside, pass `response_padding_mask`, which is 1 for every token.

        Prompts are optional. `columns` are the other fields of RolloutBatch by name, [N, L] for tokens; `turn`,
        `weights_version` and `advantage` may be [N], one value per rollout. Whole numbers are accepted for strings;
        `sample_ids` default to the row numbers. Values in padding are ignored.

        Arrays are anything that `as_array` accepts. Raises InvalidRolloutsError naming row and column; a place in a
        response is counted from its first token.
        """
        mask = mask_of(response_mask, "response_mask")
        if response_padding_mask is None:
            responses = Padding.of(mask, holes=True)
        else:
            real = mask_of(response_padding_mask, "response_padding_mask", mask.shape)
            refuse_cell("response_mask", mask, mask & ~real, "the model sampled where `response_padding_mask` is 0")
            responses = Padding.of(real, holes=False)
        prompts = Padding.of(np.zeros((mask.shape[0], 0), np.bool_), holes=True)
        prompt_tokens = np.zeros(0, np.int32)
        if prompt_token_ids is not None:
            prompts = Padding.of(mask_of(prompt_padding_mask, "prompt_padding_mask"), holes=False)
            prompt_tokens = prompts.flat(prompt_token_ids, "prompt_token_ids")
        return cls.from_arrays(
            range(mask.shape[0]) if sample_ids is None else sample_ids,
            prompt_tokens,
            prompts.offsets,
            responses.flat(response_token_ids, "response_token_ids"),
            responses.offsets,
            response_mask=responses.flat(mask, "response_mask"),
            attributes=attributes,
            check_values=check_values,
            **flat_columns(columns, {"prompt": prompts, "response": responses}),
        )

    @staticmethod
    def concat(batches: Iterable[RolloutBatch]) -> RolloutBatch:
        """Return the rollouts of all batches, in order.

        Raises InvalidRolloutsError if there is no batch, or if they logged different fields or attributes.
        """
        parts = list(batches)
        if not parts:
            raise InvalidRolloutsError("got no batch to concatenate: pass at least one")
        values: dict[str, Any] = {}
        for item in fields(RolloutBatch):
            of_parts = [getattr(part, item.name) for part in parts]
            if item.name in ("attributes", "advantage_per_token"):
                if any(value != of_parts[0] for value in of_parts):
                    raise InvalidRolloutsError("must be the same in all batches to concatenate", column=item.name)
                values[item.name] = of_parts[0]
            elif any(value is None for value in of_parts):
                if not all(value is None for value in of_parts):
                    raise InvalidRolloutsError("some of the batches lack it: log it in all or none", column=item.name)
            elif item.name.endswith("_offsets"):
                values[item.name] = concatenate_offsets(of_parts)
            elif isinstance(of_parts[0], list):
                values[item.name] = [value for part in of_parts for value in part]
            else:
                values[item.name] = np.concatenate(of_parts)
        return RolloutBatch(**values)


def _as_field(column: ColumnSpec, value: Any) -> Any:
    """Return `value` in the field's type. Raises InvalidRolloutsError if a number would change."""
    if value is None:
        return None
    if column.is_string:
        return names_of(value, column.name)
    given = as_array(value, column.name).reshape(-1)
    if given.dtype == column.dtype:
        return given
    if given.dtype.kind not in ("iub" if column.dtype.kind in "iu" else "iuf") and given.size:
        raise InvalidRolloutsError(f"must hold {column.value_type}, not {given.dtype}", column=column.name)
    if column.dtype.kind in "iu" and given.size:
        held, least, most = np.iinfo(column.dtype), int(given.min()), int(given.max())
        if least < held.min or most > held.max:
            message = f"has values from {least} to {most}, which {column.value_type} cannot hold"
            raise InvalidRolloutsError(message, column=column.name)
    with np.errstate(over="ignore"):
        return given.astype(column.dtype)


def _as_offsets(column: str, offsets: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(offsets)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        got = f"{array.dtype} of shape {list(array.shape)}"
        raise InvalidRolloutsError(f"its offsets must be N + 1 whole numbers, got {got}", column=column)
    return array.astype(np.int64)


def _length(name: str, row: int, value: Any) -> int:
    try:
        return len(value)
    except TypeError:
        raise InvalidRolloutsError(f"must be a list, not {type(value).__name__}", row=row, column=name) from None


def _flatten(name: str, rows: Sequence[Any], lengths: Sequence[int], against: str) -> NDArray[Any]:
    """Return one flat array of all rows. Raises InvalidRolloutsError if a length differs from that of `against`."""
    if len(rows) != len(lengths):
        raise InvalidRolloutsError(f"has {len(rows)} rows, but `{against}` has {len(lengths)}", column=name)
    for row, (value, length) in enumerate(zip(rows, lengths, strict=True)):
        if _length(name, row, value) != length:
            raise InvalidRolloutsError(
                f"has {len(value)} values, but `{against}` has {length}: log one value per token", row=row, column=name
            )
    arrays = [as_array(row, name) for row in rows if len(row)]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32)
