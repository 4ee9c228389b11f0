"""Import rollouts from JSON lines: one rollout a line, one file a step (`step_0001.jsonl` or `step_0001.jsonl.gz`).

A line is an object with `group` (the prompt's number in the step), `prompt_token_ids`, `response_token_ids`, and, where
known, `step`, `rollout_log_probs` (log μ), `old_log_probs` (log π before the update, which become
`trainer_log_probs`), `entropy`, `reward`, `finish_reason`. Ids are made from the step, the group and the place in the
group, so that importing a file twice gives the same rollouts.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from foreshock.errors import InvalidRolloutsError, LimitExceededError
from foreshock.rollouts.attributes import BatchAttributes
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.limits import DecodeLimits

__all__ = ["iterate_steps", "read_jsonl", "step_of_file"]

# The names of a line, and the field of RolloutBatch that each becomes.
_REQUIRED = {"prompt_token_ids": "prompt_token_ids", "response_token_ids": "response_token_ids"}
_OPTIONAL = {
    "rollout_log_probs": "rollout_log_probs",
    "old_log_probs": "trainer_log_probs",
    "entropy": "entropy",
    "reward": "reward",
    "finish_reason": "finish_reasons",
}
_STEP_FILE = re.compile(r"step_(\d+)\.jsonl(\.gz)?")


def step_of_file(path: str | Path) -> int:
    """The step in a file's name, such as 12 in `step_0012.jsonl.gz`; raises InvalidRolloutsError where it has none."""
    match = _STEP_FILE.fullmatch(Path(path).name)
    if match is None:
        raise InvalidRolloutsError(f"{Path(path).name!r} is not named like step_0012.jsonl or step_0012.jsonl.gz")
    return int(match.group(1))


def iterate_steps(
    folder: str | Path, *, attributes: BatchAttributes | None = None, limits: DecodeLimits | None = None
) -> Iterator[tuple[int, RolloutBatch]]:
    """Each step file of `folder` in the order of its steps, as (step, batch); other files are passed over.

    Raises InvalidRolloutsError where there is no step file, or where one cannot be read.
    """
    files = sorted((step_of_file(path), path) for path in Path(folder).iterdir() if _STEP_FILE.fullmatch(path.name))
    if not files:
        raise InvalidRolloutsError(f"{Path(folder).name!r} has no files named like step_0012.jsonl.gz")
    for step, path in files:
        yield step, read_jsonl(path, step=step, attributes=attributes, limits=limits)


def read_jsonl(
    path: str | Path,
    *,
    step: int | None = None,
    attributes: BatchAttributes | None = None,
    limits: DecodeLimits | None = None,
    check_values: bool = True,
) -> RolloutBatch:
    """The validated rollouts of one file, gzipped or not; `check_values` False: only their shapes are validated.

    `step` names the ids; without it the file's name does. `attributes` say what no line does, such as the temperature.
    Raises InvalidRolloutsError naming the line (from 0) and the key, LimitExceededError where the file is too large.
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
    return _batch(lines, step, attributes, check_values)


def _lines(file: IO[bytes] | gzip.GzipFile, step: int, limits: DecodeLimits) -> Iterator[dict[str, Any]]:
    """The objects of a file's lines, whose size is watched while they are decompressed."""
    size = 0
    row = -1
    while text := file.readline(limits.max_uncompressed_bytes - size + 1):
        size += len(text)
        if size > limits.max_uncompressed_bytes:
            raise LimitExceededError(f"the file has more than {limits.max_uncompressed_bytes:,} bytes")
        if not text.strip():
            continue
        row += 1
        if row >= limits.max_rollouts:
            raise LimitExceededError(f"the file has more than {limits.max_rollouts:,} rollouts")
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRolloutsError(f"the line is not JSON: {error}", row=row) from error
        if not isinstance(line, dict):
            raise InvalidRolloutsError("the line is not a JSON object", row=row)
        if line.get("step", step) != step:
            raise InvalidRolloutsError(f"says step {line['step']} in a file of step {step}", row=row, column="step")
        yield line


def _batch(
    lines: list[dict[str, Any]], step: int, attributes: BatchAttributes | None, check_values: bool
) -> RolloutBatch:
    columns: dict[str, Any] = {field: [] for field in _REQUIRED.values()}
    # A key of the first line is one of every line: half-logged columns are more likely a mistake than meant.
    columns |= {field: [] for key, field in _OPTIONAL.items() if key in lines[0]}
    keys = {field: key for key, field in (_REQUIRED | _OPTIONAL).items() if field in columns}
    sample_ids, group_ids, members = [], [], Counter[str]()
    for row, line in enumerate(lines):
        group = f"step-{step:04d}-group-{line['group']}" if line.get("group") is not None else f"step-{step:04d}"
        sample_ids.append(f"{group}-sample-{members[group]}")
        group_ids.append(group if line.get("group") is not None else None)
        members[group] += 1
        for field, values in columns.items():
            values.append(_value(line, keys[field], row))
    return RolloutBatch.from_lists(
        sample_ids,
        columns.pop("prompt_token_ids"),
        columns.pop("response_token_ids"),
        group_ids=group_ids,
        attributes=attributes,
        check_values=check_values,
        **columns,
    )


def _value(line: dict[str, Any], key: str, row: int) -> Any:
    """The value of a key, of the kind that its column needs."""
    if key not in line:
        raise InvalidRolloutsError("is missing in this line", row=row, column=key)
    value = line[key]
    if key == "finish_reason":
        if value is not None and not isinstance(value, str):
            raise InvalidRolloutsError("must be a string or null", row=row, column=key)
        return value
    if key == "reward":
        if value is None:
            return float("nan")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InvalidRolloutsError("must be a number or null", row=row, column=key)
        return value
    wanted: type | tuple[type, ...] = int if key.endswith("_ids") else (int, float)
    if not isinstance(value, list) or not all(type(item) is not bool and isinstance(item, wanted) for item in value):
        raise InvalidRolloutsError(
            f"must be a list of {'whole numbers' if wanted is int else 'numbers'}", row=row, column=key
        )
    return value
