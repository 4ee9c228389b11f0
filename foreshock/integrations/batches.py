"""The columns of a batch as a framework has it, told by the names and shapes of its tensors.

A batch is a mapping, a `DataProto` or an object of tensors, or a list of such batches. It has the tokens of whole
sequences [N, S], or of prompts and responses, and which of them are responses. **Every other column of tokens ends
where the sequences end**: one of [N, S − 1] begins at the second token, one of [N, R] has the last R. A column whose
value t belongs to token t + 1 of a matrix as wide as the tokens (`of_next`) is moved by one place.

As in dumps, a response begins at its first sampled token, and masked tokens stay in it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from foreshock.client.reporting import LogOnce
from foreshock.importers.rows import prompt_group
from foreshock.integrations.hooks import fits
from foreshock.rollouts.rollout_files import OTHER_NAMES

__all__ = ["columns_of_batch", "named_values"]

_TOKENS: Final = ("input_ids", "sequences", "token_ids")
_RESPONSE: Final = ("response_mask", "action_mask", "completion_mask", "token_mask", "token_loss_mask", "loss_mask")
_GROUPS: Final = ("group_id", "uid", "uids", "prompt_id")
_LOG_PROBS: Final = ("rollout_log_probs", "trainer_log_probs")
_TYPES: Final = {"weights_version": np.int32}
_ADVANTAGES: Final = ("advantage", *OTHER_NAMES["advantage"])
_OF_TOKENS: Final = (*_LOG_PROBS, "entropy", "weights_version", "advantage")


def columns_of_batch(batch: Any, framework: str, log: LogOnce, *, of_next: Iterable[str] = ()) -> dict[str, Any] | None:
    """Return the padded columns of `Client.log_rollouts`; None, with a warning, if tokens or responses are unknown.

    A column of another shape than the sequences, and log-probs that are 0 at every token, are left out with a warning.
    """
    if isinstance(batch, list | tuple):
        parts = [columns_of_batch(each, framework, log, of_next=of_next) for each in batch]
        return _joined([part for part in parts if part is not None], framework, log)
    values = {name: value for name, value in named_values(batch).items() if value is not None}
    if not values.keys() & {*_TOKENS} and values.keys() >= {"prompts", "responses"}:
        values["input_ids"] = np.hstack([_array(values["prompts"]), _array(values["responses"])])
    tokens = next((_array(values[name]) for name in _TOKENS if name in values and np.ndim(values[name]) == 2), None)
    if tokens is None:
        log.warning(
            "tokens",
            f"{framework}: the batch has none of {', '.join(_TOKENS)} as a matrix, so rollouts are not logged; it has "
            f"{', '.join(sorted(map(str, values))) or 'nothing'}",
        )
        return None
    shape = tokens.shape

    def aligned(name: str) -> NDArray[np.float32] | None:
        value = values.get(name)
        return None if value is None else _aligned(value, shape, name, framework, log, moved=name in of_next)

    masks = {name: mask > 0 for name in _RESPONSE if (mask := aligned(name)) is not None}
    if not masks:
        log.warning(
            "responses",
            f"{framework}: no mask of the batch tells which tokens are responses ({', '.join(_RESPONSE)}), so rollouts "
            "are not logged",
        )
        return None
    response = next(iter(masks.values()))
    trained = response & masks.get("loss_mask", response)
    sampled = trained if trained.any() else response
    real = _real(values, tokens) | response
    started = np.logical_or.accumulate(response, axis=1)
    columns: dict[str, Any] = {
        "prompt_token_ids": tokens,
        "prompt_padding_mask": real & ~started,
        "response_token_ids": tokens,
        "response_padding_mask": real & started,
        "response_mask": sampled.astype(np.uint8),
    }
    prompts = zip(tokens, columns["prompt_padding_mask"], strict=True)
    columns["group_id"] = _groups(values, len(tokens)) or [prompt_group(row[kept]) for row, kept in prompts]
    for column in _OF_TOKENS:
        for name in (column, *OTHER_NAMES.get(column, ())):
            matrix = None if column in columns else aligned(name)
            if matrix is None:
                continue
            if column in _LOG_PROBS and sampled.any() and not matrix[sampled].any():
                log.warning(name, f"{framework}: `{name}` is 0 at every token, a placeholder: it is not logged")
                continue
            columns[column] = np.where(sampled, matrix, 0).astype(_TYPES.get(column, np.float32))
    for column in ("reward", "advantage"):
        for name in (column, *OTHER_NAMES[column]):
            if (
                column not in columns
                and (numbers := _of_rollouts(values.get(name), shape[0], name, framework, log)) is not None
            ):
                columns[column] = numbers
    if "reward" not in columns and "token_level_scores" in values:
        columns["reward"] = _array(values["token_level_scores"]).sum(axis=1).astype(np.float32)
    return columns


def _joined(parts: list[dict[str, Any]], framework: str, log: LogOnce) -> dict[str, Any] | None:
    """Return the columns that all parts have, as wide as the widest."""
    if not parts:
        return None
    names = set.intersection(*(set(part) for part in parts))
    if partly := sorted({name for part in parts for name in part} - names):
        log.warning("parts", f"{framework}: not all batches of the step have {', '.join(partly)}: not logged")
    width = max(part["response_token_ids"].shape[1] for part in parts)

    def wide(column: Any) -> Any:
        return np.pad(column, ((0, 0), (width - column.shape[1], 0))) if np.ndim(column) == 2 else column

    return {name: np.concatenate([wide(part[name]) for part in parts]) for name in sorted(names)}


def named_values(batch: Any) -> dict[str, Any]:
    """Return what a batch has by name: of a mapping, of a `DataProto`, or of an object's own attributes."""
    if hasattr(batch, "batch") and hasattr(batch, "non_tensor_batch"):
        return named_values(batch.batch) | dict(batch.non_tensor_batch)
    if isinstance(batch, Mapping) or (hasattr(batch, "keys") and hasattr(batch, "__getitem__")):
        return {name: batch[name] for name in batch.keys()}  # noqa: SIM118  # A TensorDict iterates over its rows.
    return dict(vars(batch))


def _array(value: Any) -> NDArray[Any]:
    """Return a tensor, also of bfloat16, or a list as an array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    return np.asarray(value)


def _numbers(value: Any) -> NDArray[Any] | None:
    """Return a tensor or a list as an array of numbers; None if it is text, or has rows of several lengths."""
    try:
        array = _array(value)
    except (TypeError, ValueError):
        return None
    return array if array.dtype.kind in "biuf" else None


def _aligned(
    value: Any, shape: tuple[int, ...], name: str, framework: str, log: LogOnce, *, moved: bool
) -> NDArray[np.float32] | None:
    """Return a column of tokens [N, S], 0 where it has no value; None if it is not such a column."""
    matrix = _numbers(value)
    if matrix is not None and matrix.shape == shape[:1] and name in _ADVANTAGES:
        return None
    if matrix is None or matrix.ndim != 2:
        log.warning(
            name, f"{framework}: `{name}` is not a matrix of numbers [N, tokens]: it is not logged, the rest is"
        )
        return None
    if len(matrix) != shape[0] or matrix.shape[1] > shape[1]:
        fits(framework, name, matrix.shape, shape, log)
        return None
    wide = np.zeros(shape, np.float32)
    wide[:, shape[1] - matrix.shape[1] :] = matrix
    return np.roll(wide, 1, axis=1) if moved else wide


def _of_rollouts(value: Any, size: int, name: str, framework: str, log: LogOnce) -> NDArray[np.float32] | None:
    """Return a column of one number for each rollout; None if it is absent or, with a warning, something else."""
    if value is None:
        return None
    numbers = _numbers(value)
    if numbers is not None and numbers.ndim == 2 and name in _ADVANTAGES:
        return None
    if numbers is not None and numbers.shape == (size,):
        return numbers.astype(np.float32)
    log.warning(
        name, f"{framework}: `{name}` is not one number for each of the {size} rollouts: it is not logged, the rest is"
    )
    return None


def _real(values: Mapping[str, Any], tokens: NDArray[Any]) -> NDArray[np.bool_]:
    """Return True for the tokens that are not padding."""
    attention = values.get("attention_mask")
    if attention is not None and np.shape(attention) == tokens.shape:
        return _array(attention) > 0
    lengths = values.get("input_lengths")
    if lengths is not None and len(lengths) == len(tokens):
        return np.asarray(np.arange(tokens.shape[1]) < _array(lengths).reshape(-1, 1))
    return np.ones(tokens.shape, np.bool_)


def _groups(values: Mapping[str, Any], size: int) -> list[str] | None:
    found = next((values[name] for name in _GROUPS if name in values and len(values[name]) == size), None)
    return None if found is None else [str(each) for each in (found.tolist() if hasattr(found, "tolist") else found)]
