"""Read JSON lines of a dump, one at a time, within limits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foreshock.errors import InvalidRolloutsError, LimitExceededError
from foreshock.importers.dumps import Dump, refusal
from foreshock.rollouts.limits import DecodeLimits

__all__ = ["ends_with", "find_numbered", "read_lines", "required"]


def find_numbered(path: Path, pattern: re.Pattern[str]) -> list[Dump]:
    """Return one dump per file of `path` (or `path` itself) whose name matches; the first group is the step."""
    files = [path] if path.is_file() else [*path.iterdir()] if path.is_dir() else []
    named = [(pattern.fullmatch(file.name), file) for file in files if file.is_file()]
    return sorted(
        (Dump(int(match[1]), (file,)) for match, file in named if match is not None), key=lambda dump: dump.step
    )


def ends_with(path: Path, ending: bytes) -> bool:
    """Return True if the file ends with these bytes; an empty file has no end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - len(ending), 0))
            return file.read() == ending
    except OSError:
        return False


def read_lines(path: Path, limits: DecodeLimits) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the object of each line.

    Raises InvalidRolloutsError for a line that is cut off, is not JSON or not an object, and for a file without lines;
    LimitExceededError for a file with more bytes or lines than the limits.
    """
    size = count = 0
    try:
        with path.open("rb") as file:
            index = 0
            while text := file.readline(limits.max_uncompressed_bytes - size + 1):
                index += 1
                size += len(text)
                place = f"{path.name}, line {index}"
                if size > limits.max_uncompressed_bytes:
                    raise LimitExceededError(f"{path.name} has more than {limits.max_uncompressed_bytes:,} bytes")
                if not text.strip():
                    continue
                count += 1
                if count > limits.max_rollouts:
                    raise LimitExceededError(f"{path.name} has more than {limits.max_rollouts:,} rollouts")
                yield place, _object(text, place)
    except OSError as error:
        raise InvalidRolloutsError(f"{path.name} cannot be read: {error}") from error
    if not count:
        raise InvalidRolloutsError(f"{path.name} is empty: expected one JSON object per line")


def required(line: dict[str, Any], field: str, place: str) -> Any:
    """Return the value of a field. Raises InvalidRolloutsError naming the fields that are there."""
    if field not in line:
        names = ", ".join(sorted(map(str, line))[:20])
        raise refusal(place, field, f"is missing; the line has {names or 'no fields'}")
    return line[field]


def _object(text: bytes, place: str) -> dict[str, Any]:
    if not text.endswith(b"\n"):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            raise InvalidRolloutsError(
                f"{place}: the line is cut off: the trainer is still writing, or was stopped; wait, or remove it"
            ) from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRolloutsError(f"{place}: expected a JSON object, got {error}") from error
    if not isinstance(value, dict):
        raise InvalidRolloutsError(f"{place}: expected a JSON object, got {type(value).__name__}")
    return value
