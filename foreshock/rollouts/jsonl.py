"""Read rollouts from JSON lines: one rollout per line, one file per step (`step_0001.jsonl` or `step_0001.jsonl.gz`).

A line is an object with `prompt_token_ids`, `response_token_ids`, and optionally `group` (the number of the prompt in
the step), `step`, and any other column of the rollout table by its name; `old_log_probs` is accepted for
`trainer_log_probs`. Without `sample_id` the ids are made from step, group and place in the group, so that reading a
file twice gives the same rollouts. `note` gets the keys that are not read.
"""

import gzip
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from foreshock.errors import InvalidRolloutsError, LimitExceededError
from foreshock.parsing import parse_json
from foreshock.rollouts.attributes import BatchAttributes
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.schema import ROLLOUT_COLUMNS, ColumnSpec, DecodeLimits

# The columns by their key in a line; if two keys of a column are present, the later one in this table counts.
_COLUMNS = {
    "old_log_probs": next(column for column in ROLLOUT_COLUMNS if column.name == "trainer_log_probs"),
    **{column.name: column for column in ROLLOUT_COLUMNS if column.name not in ("sample_id", "group_id")},
}
_IDS = ("sample_id", "group_id")
_STEP_FILE = re.compile(r"step_(\d+)\.jsonl(\.gz)?")


def step_of_file(path: str | Path) -> int:
    """Return the step in a file's name: 12 for `step_0012.jsonl.gz`. Raises InvalidRolloutsError if it has none."""
    match = _STEP_FILE.fullmatch(Path(path).name)
    if match is None:
        raise InvalidRolloutsError(f"{Path(path).name!r} is not named like step_0012.jsonl or step_0012.jsonl.gz")
    return int(match.group(1))


def step_in_file(path: Path) -> int | None:
    """Return the `step` of the first line of a file, gzipped or not; None if there is none."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            line = parse_json(file.readline(DecodeLimits().max_uncompressed_bytes))
    except (OSError, EOFError, ValueError):
        return None
    step = line.get("step") if isinstance(line, dict) else None
    return step if type(step) is int else None


def read_jsonl(
    path: str | Path,
    *,
    step: int | None = None,
    attributes: BatchAttributes | None = None,
    limits: DecodeLimits | None = None,
    check_values: bool = True,
    note: Callable[[str], object] | None = None,
) -> RolloutBatch:
    """Return the validated rollouts of one file, gzipped or not; with `check_values=False` only shapes are validated.

    `step` is used in the ids; the default is the step in the file's name. `attributes` are those of the batch, such as
    the temperature. `note` gets a message with the keys that are not read. With it rollouts whose lists differ in
    length are left out, and another message counts them; without it, or if no rollout would be left, they are an error.
    Raises InvalidRolloutsError naming the line (from 0) and the key, LimitExceededError if the file is too large.
    """
    path = Path(path)
    step = step_of_file(path) if step is None else step
    limits = limits or DecodeLimits()
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            lines = list(_lines(file, step, limits))
    except (OSError, EOFError) as error:
        raise InvalidRolloutsError(f"{path.name!r} cannot be read: {error}") from error
    if not lines:
        raise InvalidRolloutsError(f"{path.name!r} has no rollouts")
    if note is not None:
        unread = sorted({key for line in lines for key in line} - {*_COLUMNS, *_IDS, "group", "step"})
        if unread:
            note(f"not read from the JSON lines: {', '.join(unread)}; columns: {', '.join((*_COLUMNS, *_IDS))}")
        wrong = [row for row, line in enumerate(lines) if _has_other_length(line)]
        if 0 < len(wrong) < len(lines):
            note(
                f"{len(wrong)} of {len(lines)} rollouts of {path.name} are left out, since their lists differ in "
                f"length, first in line {wrong[0]} (from 0)"
            )
            lines = [line for row, line in enumerate(lines) if row not in wrong]
    return _batch(lines, step, attributes, check_values)


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


def _lines(file: IO[bytes] | gzip.GzipFile, step: int, limits: DecodeLimits) -> Iterator[dict[str, Any]]:
    """Yield the object of each line."""
    for row, (_, text) in enumerate(filled_lines(file, limits)):
        try:
            line = parse_json(text)
        except ValueError as error:
            raise InvalidRolloutsError(f"the line is not JSON: {error}", row=row) from error
        if not isinstance(line, dict):
            raise InvalidRolloutsError("the line is not a JSON object", row=row)
        if line.get("step", step) != step:
            raise InvalidRolloutsError(f"is {line['step']} in a file of step {step}", row=row, column="step")
        yield line


def _has_other_length(line: dict[str, Any]) -> bool:
    """Return True if lists with one value per response token differ in length."""
    of_tokens = [line[key] for key, column in _COLUMNS.items() if column.side == "response" and key in line]
    return len({len(value) for value in of_tokens if isinstance(value, list)}) > 1


def _batch(
    lines: list[dict[str, Any]], step: int, attributes: BatchAttributes | None, check_values: bool
) -> RolloutBatch:
    # A key of the first line must be in every line: a column logged in some lines only is more likely a mistake.
    keys = {column.field: key for key, column in _COLUMNS.items() if column.required or key in lines[0]}
    columns: dict[str, list[Any]] = {field: [] for field in keys}
    attributes = attributes or BatchAttributes()
    sample_ids, group_ids, members = [], [], Counter[str]()
    for row, line in enumerate(lines):
        number = line.get("group")
        group = f"step-{step:04d}" if number is None else f"step-{step:04d}-group-{number}"
        own_group = line.get("group_id")
        group = group if own_group is None else str(own_group)
        sample_ids.append(str(line.get("sample_id") or f"{group}-sample-{members[group]}"))
        group_ids.append(None if number is None and own_group is None else group)
        members[group] += 1
        for field, key in keys.items():
            columns[field].append(_value(line, key, row, attributes))
    return RolloutBatch.from_lists(
        sample_ids,
        columns.pop("prompt_token_ids"),
        columns.pop("response_token_ids"),
        group_ids=group_ids,
        attributes=attributes,
        check_values=check_values,
        **columns,
    )


def _value(line: dict[str, Any], key: str, row: int, attributes: BatchAttributes) -> Any:
    """Return the value of a key. Raises InvalidRolloutsError if it is missing or of another kind than its column."""
    if key not in line:
        raise InvalidRolloutsError("is missing in this line", row=row, column=key)
    value, column = line[key], _COLUMNS[key]
    if column.is_string:
        if value is not None and not isinstance(value, str):
            raise InvalidRolloutsError("must be a string or null", row=row, column=key)
        return value
    if column.side is None or (column.level == "rollout or response token" and not isinstance(value, list)):
        null_value = attributes.null_value(column)
        if not _is_number(value, column) and (value is not None or null_value is None):
            raise InvalidRolloutsError(f"must be a {_kind(column)} or null", row=row, column=key)
        return null_value if value is None else value
    if not isinstance(value, list) or not all(_is_number(item, column) for item in value):
        raise InvalidRolloutsError(f"must be a list of {_kind(column)}s", row=row, column=key)
    return value


def _is_number(value: Any, column: ColumnSpec) -> bool:
    return type(value) is not bool and isinstance(value, (int, float) if column.dtype.kind == "f" else int)


def _kind(column: ColumnSpec) -> str:
    return "number" if column.dtype.kind == "f" else "whole number"
