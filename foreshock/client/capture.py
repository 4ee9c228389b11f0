"""Shards of rollouts in two parts: copy the trainer's arrays now, build and encode them later in the background.

The trainer's thread only copies, so that it can reuse its buffers. Everything that iterates over rollouts, validates,
measures or compresses them happens in `encode_shard`.
"""

from __future__ import annotations

import io
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from foreshock.client.deliveries import Delivery, Registration
from foreshock.client.reporting import LogOnce
from foreshock.client.settings import ClientSettings
from foreshock.errors import InvalidRolloutsError
from foreshock.measures.passes import compiled
from foreshock.rollouts.arrays import Padding, as_array, mask_of, offsets_of_lengths
from foreshock.rollouts.attributes import BatchAttributes
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.lengths import without_unequal
from foreshock.rollouts.parquet import decode_rollouts, encode_rollouts_view
from foreshock.rollouts.schema import ROLLOUT_COLUMNS
from foreshock.rollouts.validation import validate_rollouts
from foreshock.statistics_shards import FullRollouts, encode_statistics_shard

# pyarrow ships no types: its classes are Any to a type checker.
Rollouts = RolloutBatch | Mapping[str, Any] | Any
"""A RolloutBatch, a mapping of columns, a pyarrow Table or RecordBatch."""

Captured = Callable[[], RolloutBatch]
"""A function that builds the batch of captured rollouts."""

NoteLeftOut = Callable[[int, str], None]
"""Called with how many rollouts of a shard were left out, and a sentence that says why."""

_FIELD_OF = {column.name: column.field for column in ROLLOUT_COLUMNS} | {
    column.field: column.field for column in ROLLOUT_COLUMNS
}
_STRINGS = frozenset(column.field for column in ROLLOUT_COLUMNS if column.is_string)
_PROMPT = frozenset(column.field for column in ROLLOUT_COLUMNS if column.side == "prompt")
_LAYOUT = ("prompt_offsets", "response_offsets", "prompt_lengths", "response_lengths", "prompt_padding_mask",
           "response_padding_mask")  # fmt: skip
_BYTES_PER_LIST_ITEM = 8

_NUMPY_PASS = (
    "numba is not installed, so that numpy measures the tokens, which takes several times the CPU; "
    "it comes with the extra `fast` of Foreshock"
)

_LONGEST_COMPILE_SECONDS = 300.0
_pass_lock = threading.Lock()
_pass_failed = False


def size_of(rollouts: Rollouts) -> int:
    """Return an estimate of the memory of `rollouts` in bytes, without iterating over tokens.

    Raises InvalidRolloutsError if they are not columns.
    """
    if isinstance(rollouts, RolloutBatch):
        return sum(_size(getattr(rollouts, name)) for name in RolloutBatch.__slots__)
    if isinstance(rollouts, pa.Table | pa.RecordBatch):
        return int(rollouts.nbytes)
    if not isinstance(rollouts, Mapping):
        raise InvalidRolloutsError(
            f"rollouts must be a RolloutBatch, an Arrow table or a mapping of columns, got {type(rollouts).__name__}; "
            "make columns of a list of rows: {name: [row[name] for row in rows] for name in rows[0]}"
        )
    return sum(_size(value) for value in rollouts.values())


def _size(value: Any) -> int:
    if isinstance(value, list | tuple):
        inner = sum(len(item) for item in value if isinstance(item, list | tuple))
        inner += sum(int(item.nbytes) // _BYTES_PER_LIST_ITEM for item in value if hasattr(item, "nbytes"))
        return _BYTES_PER_LIST_ITEM * (len(value) + inner)
    return int(getattr(value, "nbytes", 0))


def capture_rollouts(
    rollouts: Rollouts,
    *,
    default_ids: str,
    attributes: BatchAttributes | None,
    copy: bool = True,
    note: NoteLeftOut = lambda count, sentence: None,
) -> Captured:
    """Copy the arrays that the trainer may change; return a function that builds the validated batch in the background.

    Call `size_of` first, which refuses what has no columns. The function raises InvalidRolloutsError with row and
    column. `default_ids` is the prefix of generated sample ids. `attributes` fill those that the batch lacks. `note` is
    called in the background if rollouts are left out, see `foreshock.rollouts.lengths`.
    """
    if isinstance(rollouts, RolloutBatch):
        batch = RolloutBatch(**{name: _copied(name, getattr(rollouts, name), copy) for name in RolloutBatch.__slots__})
        return lambda: _completed(_validated(batch), attributes)
    if isinstance(rollouts, pa.RecordBatch):
        rollouts = pa.Table.from_batches([rollouts])
    if isinstance(rollouts, pa.Table):
        rollouts = _copied_table(rollouts) if copy else rollouts
        return lambda: _completed(_from_table(rollouts, default_ids, note), attributes)
    columns = {}
    for name, value in rollouts.items():
        if name not in _FIELD_OF and name not in _LAYOUT:
            raise InvalidRolloutsError(f"unknown column; columns: {', '.join(_FIELD_OF)}", column=name)
        if value is not None:
            columns[_FIELD_OF.get(name, name)] = _copied(name, value, copy)
    return lambda: _completed(_from_columns(dict(columns), default_ids, note), attributes)


def _validated(batch: RolloutBatch) -> RolloutBatch:
    validate_rollouts(batch)
    return batch


def _completed(batch: RolloutBatch, attributes: BatchAttributes | None) -> RolloutBatch:
    """Fill attributes that the batch lacks from those of the call."""
    if attributes is None or attributes == BatchAttributes():
        return batch
    own = {name: getattr(batch.attributes, name) for name in BatchAttributes.__slots__}
    own = {name: value for name, value in own.items() if value is not None}
    return replace(batch, attributes=replace(attributes, **own))


def encode_shard(
    captured: Captured,
    registration: Registration,
    step: int,
    rank: tuple[int, int],
    settings: ClientSettings,
    log: LogOnce,
) -> Delivery:
    """Build and encode one shard by `settings.mode`; `rank` is its number and the number of shards.

    Call it in the background. Raises InvalidRolloutsError.
    """
    step, shard, shards = int(step), int(rank[0]), int(rank[1])
    place = {"step": step, "shard": shard, "shards": shards}
    if settings.mode == "tokens":
        return Delivery("rollouts", registration, place, encode_rollouts_view(captured()))
    if not prepare_token_pass():
        log.warning("numpy pass", _NUMPY_PASS)
    full = FullRollouts(settings.full_rollouts, settings.worst_rollouts, settings.max_step_bytes)
    # The sample of full rollouts depends only on run, step and shard: the same shard gives the same bytes.
    seed = "/".join((*registration.run_identity, str(step), str(shard), str(shards)))
    measured = encode_statistics_shard(captured(), seed=seed, full=full.of_shard(shard, shards))
    return Delivery("statistics", registration, place, measured)


def prepare_token_pass() -> bool:
    """Load the compiled pass over tokens, or compile it in another process first; return False if numpy's is used.

    Later calls return at once: the pass does not change within a process, so that the same shard gives the same bytes.
    """
    global _pass_failed
    with _pass_lock:
        if compiled.is_prepared():
            return True
        if _pass_failed or not compiled.available():
            return False
        try:
            # In another process first: the compiler holds the GIL, for which the trainer would wait. The second call
            # loads what the first one compiled.
            command = [sys.executable, "-c", f"from {compiled.__name__} import prepare; prepare()"]
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LONGEST_COMPILE_SECONDS)
            compiled.prepare()
        except Exception:
            # For example a numba that does not support this numpy; numpy's pass gives the same numbers.
            _pass_failed = True
        return not _pass_failed


def _copied(name: str, value: Any, copy: bool) -> Any:
    """Return a copy of `value` that the trainer cannot change: arrays are copied, lists copied deeply."""
    value = _to_numpy(name, value)
    if not copy:
        return value
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return _copied_table(pa.table({name: value})).column(0)
    if isinstance(value, list | tuple):
        # Only the first item that is one is checked: to check each of 3 M items would take half a second.
        if not _is_row(next((item for item in value if item is not None), None)):
            return list(value)
        return [_copied(name, item, copy) if _is_row(item) else item for item in value]
    return value


def _copied_table(table: pa.Table) -> pa.Table:
    """Return a table of its own memory. Of a slice only its own rows are written, at the speed of a copy."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def _is_row(item: Any) -> bool:
    return isinstance(item, list | tuple | np.ndarray) or _is_tensor(item)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "numpy")


def _to_numpy(name: str, value: Any) -> Any:
    """Return a torch tensor on the CPU as a numpy array, any other value unchanged.

    A tensor on a device is refused: copying it here would make the trainer's thread wait for the device.
    """
    if not _is_tensor(value):
        return value
    if getattr(value.device, "type", "cpu") != "cpu":
        raise InvalidRolloutsError(
            f"the tensor is on device {value.device}; copy it to the CPU before logging", column=name
        )
    return as_array(value, name)


def _from_table(table: pa.Table, default_ids: str, note: NoteLeftOut) -> RolloutBatch:
    """Convert an Arrow table; the same columns and types as in a Parquet file are allowed."""
    if "sample_id" not in table.column_names:
        table = table.append_column("sample_id", pa.array(_default_ids(default_ids, range(table.num_rows))))
    _, fits, sentence = without_unequal(dict(zip(table.column_names, table.columns, strict=True)))
    if fits is not None:
        table = table.filter(pa.array(fits))
        note(fits.size - table.num_rows, sentence)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="none", row_group_size=64, write_statistics=False, use_dictionary=False)
    return decode_rollouts(sink.getvalue())


def _from_columns(columns: dict[str, Any], default_ids: str, note: NoteLeftOut) -> RolloutBatch:
    """Build a batch from flat arrays and offsets, padded arrays and masks, Arrow lists, or lists of rollouts."""
    layout = {name: columns.pop(name) for name in _LAYOUT if name in columns}
    columns, fits, sentence = without_unequal(columns)
    if fits is not None:
        note(int(np.count_nonzero(~fits)), sentence)
    for name in ("prompt_token_ids", "response_token_ids"):
        if name not in columns:
            raise InvalidRolloutsError("this column is required", column=name)
    for name, value in columns.items():
        if isinstance(value, pa.Array | pa.ChunkedArray):
            columns[name] = _from_arrow(name, value, layout)
    prompts = _offsets("prompt", columns, layout)
    responses = _offsets("response", columns, layout)
    rollouts = (len(responses) if responses is not None else len(columns["response_token_ids"]) + 1) - 1
    sample_ids = columns.pop("sample_ids", None)
    if sample_ids is None:
        sample_ids = _default_ids(default_ids, range(rollouts) if fits is None else np.flatnonzero(fits))
    sample_ids = [str(name) for name in sample_ids]
    if isinstance(columns.get("reward"), list | tuple):
        columns["reward"] = [math.nan if each is None else each for each in columns["reward"]]
    for name in _STRINGS & columns.keys():
        columns[name] = [None if item is None else str(item) for item in columns[name]]
    if prompts is None and responses is None:
        return RolloutBatch.from_lists(sample_ids, **columns)
    if prompts is None or responses is None:
        missing = "prompt" if prompts is None else "response"
        raise InvalidRolloutsError(
            f"add `{missing}_offsets`, or pass lists for both prompts and responses", column=f"{missing}_token_ids"
        )
    return RolloutBatch.from_arrays(sample_ids, prompt_offsets=prompts, response_offsets=responses, **columns)


def _default_ids(start: str, rows: Iterable[int]) -> list[str]:
    return [f"{start}-{row}" for row in rows]


def _from_arrow(name: str, array: pa.Array | pa.ChunkedArray, layout: dict[str, Any]) -> Any:
    """Return an Arrow column as a flat array (its lengths go into `layout`) or as one value per rollout."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if name in _STRINGS:
        return array.to_pylist()
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        if array.null_count:
            raise InvalidRolloutsError("a list is null; use an empty list", column=name)
        side = "prompt" if name in _PROMPT else "response"
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        if name in ("prompt_token_ids", "response_token_ids"):
            layout[f"{side}_lengths"] = lengths
        array = array.flatten()
    return array.to_numpy(zero_copy_only=False)


def _offsets(side: str, columns: dict[str, Any], layout: Mapping[str, Any]) -> NDArray[np.int64] | None:
    """Return the offsets [N + 1] of prompts or responses, None for lists of rollouts; flattens padded arrays."""
    if f"{side}_padding_mask" in layout:
        mask = f"{side}_padding_mask"
        padding = Padding.of(mask_of(layout[mask], mask), holes=False)
        for name, value in columns.items():
            if (name in _PROMPT) == (side == "prompt") and isinstance(value, np.ndarray) and value.ndim == 2:
                columns[name] = padding.flat(value, name)
        return padding.offsets
    if f"{side}_offsets" in layout:
        return np.asarray(layout[f"{side}_offsets"])
    if f"{side}_lengths" in layout:
        return offsets_of_lengths(np.asarray(layout[f"{side}_lengths"]))
    tokens = columns[f"{side}_token_ids"]
    if not isinstance(tokens, Sequence):
        raise InvalidRolloutsError(
            f"add `{side}_offsets` (or `{side}_lengths`) for a flat array, `{side}_padding_mask` for a padded one",
            column=f"{side}_token_ids",
        )
    return None
