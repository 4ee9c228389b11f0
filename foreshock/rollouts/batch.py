"""A batch of rollouts in memory: flat numpy arrays and offsets, one field per column of the schema."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.errors import InvalidRolloutsError
from foreshock.rollouts.arrays import as_array, names_of
from foreshock.rollouts.attributes import BatchAttributes
from foreshock.rollouts.padded import Padding, flat_columns, mask_of, refuse_cell
from foreshock.rollouts.ragged import concatenate_offsets, offsets_of_lengths, take_rows
from foreshock.rollouts.schema import ROLLOUT_COLUMNS, ColumnSpec
from foreshock.rollouts.validation import validate_rollouts

__all__ = ["BatchAttributes", "RolloutBatch"]

_DTYPES: dict[str, Any] = {"uint8": np.uint8, "int16": np.int16, "int32": np.int32, "float32": np.float32}


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """N rollouts with T response tokens in all and P prompt tokens in all: flat values plus offsets, no padding.

    The tokens of rollout i are `response_token_ids[response_offsets[i]:response_offsets[i + 1]]`; every [T]
    field is cut the same way. A field that is None was not logged. Missing numbers of a rollout are NaN, missing
    strings None. The constructor trusts its arguments; `from_arrays`, `from_lists`, `from_padded` and `decode_rollouts`
    validate.
    """

    sample_ids: list[str]  # N, unique in the batch
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
    group_ids: list[str | None] | None = None  # N
    data_sources: list[str | None] | None = None  # N
    reward: NDArray[np.float32] | None = None  # [N]
    advantage: NDArray[np.float32] | None = None  # [T] where advantage_per_token, else [N]
    finish_reasons: list[str | None] | None = None  # N
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
        """T: response tokens of all rollouts, tool output included."""
        return int(self.response_offsets[-1])

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """[N] response tokens per rollout, tool output included."""
        return np.diff(self.response_offsets)

    @property
    def generated(self) -> NDArray[np.bool_]:
        """[T] True where the model sampled the token: what measures are taken over."""
        if self.response_mask is None:
            return np.ones(self.num_tokens, dtype=np.bool_)
        return np.asarray(self.response_mask != 0, dtype=np.bool_)

    @property
    def generated_lengths(self) -> NDArray[np.int64]:
        """[N] model-generated tokens per rollout: the length that every length statistic means."""
        if self.response_mask is None:
            return self.response_lengths
        running = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.generated, dtype=np.int64)])
        return np.diff(running[self.response_offsets])

    def per_token(self, column: ColumnSpec) -> bool:
        """Whether this batch holds `column` as one value per token."""
        return self.advantage_per_token if column.shape == "rollout or response" else column.shape != "rollout"

    def select(self, indices: ArrayLike) -> RolloutBatch:
        """The rollouts at `indices` (integers or a boolean [N] mask), in that order; IndexError for others."""
        chosen = np.asarray(indices)
        # An empty list has the type of its missing numbers.
        rows = np.arange(self.num_rollouts)[chosen if chosen.size else chosen.astype(np.int64)]
        prompt_positions, prompt_offsets = take_rows(self.prompt_offsets, rows)
        positions, response_offsets = take_rows(self.response_offsets, rows)
        values: dict[str, Any] = {}
        for column in ROLLOUT_COLUMNS:
            value = getattr(self, column.field)
            if isinstance(value, list):
                value = [value[row] for row in rows.tolist()]
            elif value is not None:
                of_tokens = prompt_positions if column.shape == "prompt" else positions
                value = value[of_tokens if self.per_token(column) else rows]
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
        """A validated batch of flat arrays (lists, numpy's, torch's: see `as_array`) and offsets.

        `columns` are the other fields of RolloutBatch by name; strings may be whole numbers. `advantage` is taken per
        token where its size is T and not N. `check_values` False: only shapes are validated. Raises
        InvalidRolloutsError naming row and column.
        """
        columns |= {"prompt_token_ids": prompt_token_ids, "response_token_ids": response_token_ids}
        per_token = columns.pop("advantage_per_token", None)
        known = {column.field: column for column in ROLLOUT_COLUMNS}
        values: dict[str, Any] = {"sample_ids": names_of(sample_ids, "sample_id")}
        for name, value in columns.items():
            if name not in known:
                raise InvalidRolloutsError(f"there is no such field; the fields are {', '.join(known)}", column=name)
            values[name] = _as_field(known[name], value)
        values["prompt_offsets"] = _as_offsets("prompt_token_ids", prompt_offsets)
        values["response_offsets"] = _as_offsets("response_token_ids", response_offsets)
        if per_token is None:
            advantage = values.get("advantage")
            per_token = advantage is not None and advantage.size != len(values["sample_ids"])
        batch = cls(**values, attributes=attributes or BatchAttributes(), advantage_per_token=bool(per_token))
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
        """A validated batch of one list per rollout and column. Raises InvalidRolloutsError naming row and column."""
        rows = {"prompt_token_ids": prompt_token_ids, "response_token_ids": response_token_ids, **columns}
        lengths = {
            name: [_length(name, row, value) for row, value in enumerate(rows[name])]
            for name in ("prompt_token_ids", "response_token_ids")
        }
        shapes = {column.field: column.shape for column in ROLLOUT_COLUMNS}
        flat: dict[str, Any] = {}
        for name, value in rows.items():
            ragged = shapes.get(name) in ("prompt", "response")
            if shapes.get(name) == "rollout or response" and value is not None and len(value):
                ragged = np.ndim(value[0]) == 1
                flat["advantage_per_token"] = ragged
            if value is not None and ragged:
                against = "prompt_token_ids" if shapes[name] == "prompt" else "response_token_ids"
                value = _flatten(name, value, lengths[against], against)
            if value is not None:
                flat[name] = value
        return cls.from_arrays(
            sample_ids,
            prompt_offsets=offsets_of_lengths(lengths["prompt_token_ids"]),
            response_offsets=offsets_of_lengths(lengths["response_token_ids"]),
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
        """A validated batch of padded arrays, as trainers hold them: [N, L], and [N, P] for the prompts.

        `response_mask` is 1 where the model sampled. A response goes from its first 1 to its last, whichever side is
        padded; a 0 between them is a token that the model did not sample. Where that is not so (a response that begins
        or ends with a tool's output, or has padding inside it), `response_padding_mask` says which cells are tokens.
        Prompts may be left out. `columns` are the other fields of RolloutBatch by name: those of tokens are [N, L];
        `turn`, `weights_version` and `advantage` may be [N], one value a rollout. Strings may be whole numbers;
        `sample_ids` are the numbers of the rows unless given. What stands in padding is never looked at.

        Arrays are anything that `as_array` takes. Raises InvalidRolloutsError naming row and column; a place in a
        response is counted from its first token.
        """
        mask = mask_of(response_mask, "response_mask")
        if response_padding_mask is None:
            padding = Padding.of(mask, holes=True)
        else:
            real = mask_of(response_padding_mask, "response_padding_mask", mask.shape)
            refuse_cell("response_mask", mask, mask & ~real, "the model sampled where `response_padding_mask` is 0")
            padding = Padding.of(real, holes=False)
        flat = flat_columns(padding, columns)
        prompts = Padding.of(np.zeros((mask.shape[0], 0), np.bool_), holes=True)
        prompt_tokens = np.zeros(0, np.int32)
        if prompt_token_ids is not None:
            prompts = Padding.of(mask_of(prompt_padding_mask, "prompt_padding_mask"), holes=False)
            prompt_tokens = prompts.flat(prompt_token_ids, "prompt_token_ids")
        return cls.from_arrays(
            range(mask.shape[0]) if sample_ids is None else sample_ids,
            prompt_tokens,
            prompts.offsets,
            padding.flat(response_token_ids, "response_token_ids"),
            padding.offsets,
            response_mask=padding.flat(mask, "response_mask"),
            attributes=attributes,
            check_values=check_values,
            **flat,
        )

    @staticmethod
    def concat(batches: Iterable[RolloutBatch]) -> RolloutBatch:
        """The rollouts of all batches, in order; they must have logged the same fields and attributes.

        Raises InvalidRolloutsError where they have not, or where there is no batch.
        """
        parts = list(batches)
        if not parts:
            raise InvalidRolloutsError("there is nothing to put together: give at least one batch")
        values: dict[str, Any] = {}
        for item in fields(RolloutBatch):
            of_parts = [getattr(part, item.name) for part in parts]
            if item.name in ("attributes", "advantage_per_token"):
                if any(value != of_parts[0] for value in of_parts):
                    raise InvalidRolloutsError("the batches disagree; put together only alike ones", column=item.name)
                values[item.name] = of_parts[0]
            elif any(value is None for value in of_parts):
                if not all(value is None for value in of_parts):
                    raise InvalidRolloutsError("some of the batches lack it; log it in all or none", column=item.name)
            elif item.name.endswith("_offsets"):
                values[item.name] = concatenate_offsets(of_parts)
            elif isinstance(of_parts[0], list):
                values[item.name] = [value for part in of_parts for value in part]
            else:
                values[item.name] = np.concatenate(of_parts)
        return RolloutBatch(**values)


def _as_field(column: ColumnSpec, value: Any) -> Any:
    """`value` in the field's own type; raises InvalidRolloutsError where numbers would change by it."""
    if value is None:
        return None
    if column.value_type == "string":
        return names_of(value, column.name)
    given = as_array(value, column.name).reshape(-1)
    wanted = np.dtype(_DTYPES[column.value_type])
    if given.dtype == wanted:
        return given
    if given.dtype.kind not in ("iub" if wanted.kind in "iu" else "iuf") and given.size:
        raise InvalidRolloutsError(f"must hold {column.value_type}, not {given.dtype}", column=column.name)
    if wanted.kind in "iu" and given.size:
        held, least, most = np.iinfo(wanted), int(given.min()), int(given.max())
        if least < held.min or most > held.max:
            message = f"has values from {least} to {most}, which {column.value_type} cannot hold"
            raise InvalidRolloutsError(message, column=column.name)
    with np.errstate(over="ignore"):
        return given.astype(wanted)


def _as_offsets(column: str, offsets: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(offsets)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise InvalidRolloutsError("its offsets must be one row of N + 1 whole numbers", column=column)
    return array.astype(np.int64)


def _length(name: str, row: int, value: Any) -> int:
    try:
        return len(value)
    except TypeError:
        raise InvalidRolloutsError(f"must be a list, not {type(value).__name__}", row=row, column=name) from None


def _flatten(name: str, rows: Sequence[Any], lengths: Sequence[int], against: str) -> NDArray[Any]:
    """One flat array of all rows, whose lengths must be those of `against`."""
    if len(rows) != len(lengths):
        raise InvalidRolloutsError(f"has {len(rows)} rows where `{against}` has {len(lengths)}", column=name)
    for row, (value, length) in enumerate(zip(rows, lengths, strict=True)):
        if _length(name, row, value) != length:
            raise InvalidRolloutsError(
                f"has {len(value)} values where `{against}` has {length}: log one value per token", row=row, column=name
            )
    arrays = [as_array(row, name) for row in rows if len(row)]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32)
