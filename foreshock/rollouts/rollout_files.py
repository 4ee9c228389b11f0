"""Read rollouts from files of any writer: JSON lines, gzipped or not, and Parquet; one rollout a row.

A row has the columns of the rollout table under their names, under `OTHER_NAMES` of them, or under names that the
caller gives (`renamed`); besides `group`, the number of the prompt in the step, and `step`. Without `sample_id` the ids
are made from step, group and place in the group, so that reading a file twice gives the same rollouts. A file whose
name has no step may have the rollouts of several steps.

A Parquet file with columns of the table alone is decoded as a shard is; all others row by row, here.
"""

import functools
import gzip
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from foreshock.errors import InvalidRolloutsError, LimitExceededError
from foreshock.parsing import parse_json
from foreshock.rollouts.attributes import BatchAttributes
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.lengths import left_out
from foreshock.rollouts.parquet import decode_rollouts
from foreshock.rollouts.parquet_files import arrow_errors
from foreshock.rollouts.schema import ATTRIBUTES_KEY, ROLLOUT_COLUMNS, ColumnSpec, DecodeLimits

OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "prompt_token_ids": ("prompt_tokens", "prompt_ids"),
        "response_token_ids": ("response_tokens", "completion_ids", "completion_token_ids"),
        "rollout_log_probs": (
            "rollout_logprobs", "generation_logprobs", "inference_logprobs", "infer_logprobs", "generator_logprobs",
            "rollout_per_token_logps", "sampling_per_token_logps", "completion_logprobs", "logprobs",
        ),
        "trainer_log_probs": (
            "old_log_probs", "old_per_token_logps", "action_log_probs", "prev_logprobs", "trainer_logprobs",
            "training_logprobs", "prox_logp",
        ),
        "response_mask": ("loss_mask", "action_mask", "completion_mask", "token_mask", "mask"),
        "entropy": ("entropys", "entropies"),
        "weights_version": ("versions",),
        "advantage": ("advantages",),
        "reward": ("rewards",),
        "data_source": ("dataset",),
        "group": ("prompt_idx",),
    }
)  # fmt: skip
"""Columns and the names that frameworks have for them (verl, TRL, ms-swift, SkyRL, OpenRLHF, NeMo-RL, prime-rl, AReaL,
tinker, open-instruct, ROLL, torchtitan); of several the first counts."""

COLUMNS: Final = {column.name: column for column in ROLLOUT_COLUMNS}
READABLE: Final = (*COLUMNS, "group", "step")
"""Names of the fields that a row may have."""

Note = Callable[[str], object]
NoteLeftOut = Callable[[int, str], object]
"""Gets the number of rollouts that are left out, and a sentence."""
Row = Mapping[str, Any]

_NOTHING: Mapping[str, str] = MappingProxyType({})
_STEP_IN_NAME = re.compile(r"(?:^|[^a-zA-Z])step[_=-]?(\d+)", re.IGNORECASE)
_PARQUET_MAGIC = b"PAR1"
_logger = logging.getLogger(__name__)


def step_of_file(path: str | Path) -> int | None:
    """Return the step in a file's name: 12 for `step_0012.jsonl.gz` and `rollouts-step=12.parquet`."""
    match = _STEP_IN_NAME.search(Path(path).name)
    return None if match is None else int(match[1])


def steps_in_file(path: Path, renamed: Mapping[str, str] = _NOTHING) -> list[int]:
    """Return the step in a file's name, else those of its column `step`; none if it has neither or is unreadable."""
    in_name = step_of_file(path)
    if in_name is not None:
        return [in_name]
    try:
        rows = _rows(path, DecodeLimits())
    except InvalidRolloutsError:
        return []
    names = [name for name, column in renamed.items() if column == "step"] or ["step"]
    return sorted({row[name] for name in names for row in rows if type(row.get(name)) is int})


def read_rollout_file(
    path: str | Path,
    *,
    step: int | None = None,
    attributes: BatchAttributes | None = None,
    limits: DecodeLimits | None = None,
    check_values: bool = True,
    note: Note = _logger.info,
    note_left_out: NoteLeftOut | None = None,
    renamed: Mapping[str, str] = _NOTHING,
) -> RolloutBatch:
    """Return the validated rollouts of one step; with `check_values=False` only shapes are validated.

    `step` is by default the one in the file's name. `attributes` are those of the batch, such as the temperature, if
    the file has none. `renamed` has the columns of this reader by the file's names for them. `note` gets a message with
    the names that are not read. Rollouts whose lists differ in length are left out; `note_left_out`, else `note`, gets
    the sentence that counts them. If none would be left, they are an error. Raises InvalidRolloutsError naming the row
    (from 0) and the column, LimitExceededError if the file is too large.
    """
    path = Path(path)
    limits = limits or DecodeLimits()
    note_left_out = note_left_out or (lambda _, sentence: note(sentence))
    try:
        in_name = step_of_file(path)
        step = in_name if step is None else step
        if step is None:
            raise InvalidRolloutsError(
                f"{path.name} has no step in its name: name it like step_0012.jsonl, or pass `step`"
            )
        if path.suffix == ".parquet":
            data = _parquet_of(path)
            with arrow_errors():
                schema = pq.read_schema(pa.BufferReader(data))
            names, text = set(schema.names), (schema.metadata or {}).get(ATTRIBUTES_KEY)
            attributes = attributes if text is None else BatchAttributes.from_json(text)
            if "sample_id" in names and names <= COLUMNS.keys() and not renamed:
                try:
                    return decode_rollouts(data, limits, check_values=check_values)
                except InvalidRolloutsError:
                    pass  # Its rollouts are read one by one: only some may be unequal in length.
        rows = _with_own_names(_rows(path, limits), renamed, note, path)
        of_step = [row for row in rows if row.get("step", step) == step]
        if in_name is not None and len(of_step) < len(rows):
            number = next(number for number, row in enumerate(rows) if row.get("step", step) != step)
            raise InvalidRolloutsError(f"is {rows[number]['step']} in a file of step {step}", row=number, column="step")
        if not of_step:
            raise InvalidRolloutsError(f"{path.name} has no rollouts{f' of step {step}' if rows else ''}")
        wrong = [number for number, row in enumerate(of_step) if _has_other_length(row)]
        if 0 < len(wrong) < len(of_step):
            sentence = left_out(len(wrong), len(of_step), f"{path.name}, row {wrong[0]} (from 0)")
            note_left_out(len(wrong), sentence)
            of_step = [row for number, row in enumerate(of_step) if number not in set(wrong)]
        return _batch(of_step, step, attributes or BatchAttributes(), check_values)
    except InvalidRolloutsError as error:
        if path.name in error.message:
            raise
        message = f"{error.message}, in {path.name}"
        raise InvalidRolloutsError(message, row=error.row, column=error.column) from error


def filled_lines(
    file: IO[bytes] | gzip.GzipFile, limits: DecodeLimits, name: str = "the file"
) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the bytes of each line that is not blank; check limits while decompressing.

    Raises LimitExceededError, whose message begins with `name`.
    """
    number = size = rollouts = 0
    while text := file.readline(limits.max_uncompressed_bytes - size + 1):
        number, size = number + 1, size + len(text)
        if size > limits.max_uncompressed_bytes:
            raise LimitExceededError(f"{name} has more than {limits.max_uncompressed_bytes:,} bytes")
        if not text.strip():
            continue
        rollouts += 1
        if rollouts > limits.max_rollouts:
            raise LimitExceededError(f"{name} has more than {limits.max_rollouts:,} rollouts")
        yield number, text


def _rows(path: Path, limits: DecodeLimits) -> Sequence[Row]:
    """Return the rows of a file; those of the newest one stay in memory, since it may have many steps."""
    try:
        return _rows_as_of(path, path.stat().st_mtime_ns, limits)
    except (OSError, EOFError) as error:
        raise InvalidRolloutsError(f"{path.name!r} cannot be read: {error}") from error


@functools.lru_cache(maxsize=1)
def _rows_as_of(path: Path, _changed: int, limits: DecodeLimits) -> Sequence[Row]:
    if path.suffix == ".parquet":
        with arrow_errors():
            table = pq.ParquetFile(pa.BufferReader(_parquet_of(path)))
            groups = (table.metadata.row_group(number) for number in range(table.metadata.num_row_groups))
            if sum(group.total_byte_size for group in groups) > limits.max_uncompressed_bytes:
                raise LimitExceededError(f"{path.name} has more than {limits.max_uncompressed_bytes:,} bytes")
            rows: list[Row] = table.read().to_pylist()
            return rows
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        return [_object(text, row) for row, (_, text) in enumerate(filled_lines(file, limits))]


def _object(text: bytes, row: int) -> Row:
    try:
        line = parse_json(text)
    except ValueError as error:
        raise InvalidRolloutsError(f"the line is not JSON: {error}", row=row) from error
    if not isinstance(line, dict):
        raise InvalidRolloutsError("the line is not a JSON object", row=row)
    return line


def _parquet_of(path: Path) -> bytes:
    """Return the bytes of a Parquet file. Raises InvalidRolloutsError if it is not one."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRolloutsError(f"{path.name!r} cannot be read: {error}") from error
    if data.startswith(_PARQUET_MAGIC) and len(data) > len(_PARQUET_MAGIC) and data.endswith(_PARQUET_MAGIC):
        return data
    if not data or data.startswith(_PARQUET_MAGIC):
        raise InvalidRolloutsError(f"{path.name} is empty or cut off: expected a Parquet file")
    raise InvalidRolloutsError(f"{path.name} is not a Parquet file")


def _with_own_names(rows: Sequence[Row], renamed: Mapping[str, str], note: Note, path: Path) -> Sequence[Row]:
    """Return the rows with the names of `READABLE`; note the others, and those that were taken for a column."""
    given = {name for row in rows for name in row}
    absent = sorted(renamed.keys() - given)
    if absent and rows:
        raise InvalidRolloutsError(f"{path.name} has no column {absent[0]!r}; columns: {', '.join(sorted(given))}")
    names = dict(renamed)
    for column, others in OTHER_NAMES.items():
        if column not in given and column not in renamed.values():
            names |= dict.fromkeys([each for each in others if each in given - names.keys()][:1], column)
    unread = sorted(given - {*READABLE, *names})
    taken = [f"{name} as {column}" for name, column in sorted(names.items()) if name not in renamed]
    if taken:
        note(f"read {', '.join(taken)}")
    if unread:
        columns = ", ".join(each for each in READABLE if each not in {*given, *names.values()})
        note(f"not read: {', '.join(unread)}; --map NAME=COLUMN reads a name as one of {columns}")
    replaced = set(names.values())
    return [
        {names.get(name, name): value for name, value in row.items() if name in names or name not in replaced}
        for row in rows
    ]


def _has_other_length(row: Row) -> bool:
    """Return True if lists with one value per response token differ in length."""
    of_tokens = [row[key] for key, column in COLUMNS.items() if column.side == "response" and key in row]
    return len({len(value) for value in of_tokens if isinstance(value, list)}) > 1


def _batch(rows: Sequence[Row], step: int, attributes: BatchAttributes, check_values: bool) -> RolloutBatch:
    # A key of the first row must be in every row: a column logged in some rows only is more likely a mistake.
    ids = ("sample_id", "group_id")
    keys = {column.field: key for key, column in COLUMNS.items()
            if key not in ids and (column.required or key in rows[0])}  # fmt: skip
    columns: dict[str, list[Any]] = {field: [] for field in keys}
    sample_ids, group_ids, members = [], [], Counter[str]()
    for number, row in enumerate(rows):
        prompt = row.get("group")
        group = f"step-{step:04d}" if prompt is None else f"step-{step:04d}-group-{prompt}"
        own_group = row.get("group_id")
        group = group if own_group is None else str(own_group)
        own = row.get("sample_id")
        sample_ids.append(f"{group}-sample-{members[group]}" if own is None else str(own))
        group_ids.append(None if prompt is None and own_group is None else group)
        members[group] += 1
        for field, key in keys.items():
            columns[field].append(_value(row, key, number, attributes))
    return RolloutBatch.from_lists(
        sample_ids,
        columns.pop("prompt_token_ids"),
        columns.pop("response_token_ids"),
        group_ids=group_ids,
        attributes=attributes,
        check_values=check_values,
        **columns,
    )


def _value(row: Row, key: str, number: int, attributes: BatchAttributes) -> Any:
    """Return the value of a key. Raises InvalidRolloutsError if it is missing or of another kind than its column."""
    if key not in row:
        raise InvalidRolloutsError(
            f"is missing; the row has {', '.join(list(row)[:20]) or 'nothing'}; --map NAME={key} reads another name, "
            "and a file of texts cannot be read: log token ids and log-probs instead",
            row=number,
            column=key,
        )
    value, column = row[key], COLUMNS[key]
    if column.is_string:
        if value is not None and not isinstance(value, str):
            raise InvalidRolloutsError("must be a string or null", row=number, column=key)
        return value
    if column.side is None or (column.level == "rollout or response token" and not isinstance(value, list)):
        null_value = attributes.null_value(column)
        if not _is_number(value, column) and (value is not None or null_value is None):
            raise InvalidRolloutsError(f"must be a {_kind(column)} or null", row=number, column=key)
        return null_value if value is None else value
    if not isinstance(value, list) or not all(_is_number(item, column) for item in value):
        raise InvalidRolloutsError(f"must be a list of {_kind(column)}s", row=number, column=key)
    return value


def _is_number(value: Any, column: ColumnSpec) -> bool:
    is_mask = column.value_type == "uint8"
    return (is_mask or type(value) is not bool) and isinstance(value, (int, float) if column.dtype.kind == "f" else int)


def _kind(column: ColumnSpec) -> str:
    return "number" if column.dtype.kind == "f" else "whole number"
