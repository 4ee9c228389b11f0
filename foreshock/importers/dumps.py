"""The input of importers: dumps of a training framework, one per step, and their JSON lines."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foreshock.errors import InvalidRolloutsError
from foreshock.parsing import parse_json
from foreshock.rollouts.attributes import BatchAttributes
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.rollout_files import filled_lines
from foreshock.rollouts.schema import DecodeLimits

METRICS_ONLY = "; a log with metrics only is read by `foreshock backtest`"


@dataclass(frozen=True, slots=True)
class Dump:
    """The files of one step.

    `finished` is read from the framework's own marker; None if the framework writes no marker. `missing` names files of
    the step that are not there yet.
    """

    step: int
    files: tuple[Path, ...]
    finished: bool | None = None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImportedStep:
    """The content of a dump: one batch per shard, numbers under the framework's own names, and remarks for the user.

    `left_out`: the number of rollouts that no batch has, since they are wrong, and a sentence; one for each file.
    """

    step: int
    batches: tuple[RolloutBatch, ...] = ()
    scalars: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    left_out: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of reading.

    `allow_pickle` permits formats that are pickles. `reward_key` is the entry of rewards that are mappings. `renamed`
    has columns of the rollout table by the files' own names. Without `check_values` only shapes are checked.
    """

    allow_pickle: bool = False
    reward_key: str | None = None
    attributes: BatchAttributes = field(default_factory=BatchAttributes)
    limits: DecodeLimits = field(default_factory=DecodeLimits)
    renamed: Mapping[str, str] = field(default_factory=dict)
    check_values: bool = True

    def attributes_or(self, **defaults: Any) -> BatchAttributes:
        """Return the attributes, with these defaults for those that the user did not give."""
        lacking = {name: value for name, value in defaults.items() if getattr(self.attributes, name) is None}
        return replace(self.attributes, **lacking)


@dataclass(frozen=True, slots=True)
class DumpFormat:
    """A format of dumps; `foreshock.importers.FORMATS` has all of them.

    Args:
        name: the value of `foreshock import --format`.
        framework: the trainer's name for the description of the run; empty: any.
        layout: the files, in words, for error messages.
        find: returns the dumps at or below a path by step; none if there are no files of this format.
        read: reads a finished dump. Raises RolloutsError naming file, line or row, and field.
    """

    name: str
    framework: str
    layout: str
    find: Callable[[Path], list[Dump]]
    read: Callable[[Dump, ReadOptions], ImportedStep]


def refusal(place: str, field: str | None, problem: str) -> InvalidRolloutsError:
    """Return the error of an invalid value: `rank_0.jsonl, line 3, field `token_ids`: problem`."""
    where = f"{place}, field `{field}`" if field is not None else place
    return InvalidRolloutsError(f"{where}: {problem}")


def find_numbered(path: Path, pattern: re.Pattern[str]) -> list[Dump]:
    """Return one dump per file of `path` (or `path` itself) whose name matches; the first group is the step."""
    files = [path] if path.is_file() else [*path.iterdir()] if path.is_dir() else []
    named = [(pattern.fullmatch(file.name), file) for file in files if file.is_file()]
    return sorted(
        (Dump(int(match[1]), (file,)) for match, file in named if match is not None), key=lambda dump: dump.step
    )


def read_lines(path: Path, limits: DecodeLimits) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the object of each line.

    Raises InvalidRolloutsError for a line that is cut off, is not JSON or not an object, and for a file without lines;
    LimitExceededError for a file with more bytes or lines than the limits.
    """
    found = False
    try:
        with path.open("rb") as file:
            for number, text in filled_lines(file, limits, path.name):
                found, place = True, f"{path.name}, line {number}"
                yield place, _object(text, place)
    except OSError as error:
        raise InvalidRolloutsError(f"{path.name} cannot be read: {error}") from error
    if not found:
        raise InvalidRolloutsError(f"{path.name} is empty: expected one JSON object per line")


def required(line: dict[str, Any], field: str, place: str) -> Any:
    """Return the value of a field. Raises InvalidRolloutsError naming the fields that are there."""
    if field not in line:
        names = ", ".join(sorted(map(str, line))[:20])
        raise refusal(place, field, f"is missing; the line has {names or 'no fields'}")
    return line[field]


def _object(text: bytes, place: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        if not text.endswith(b"\n"):
            raise InvalidRolloutsError(
                f"{place}: the line is cut off: the trainer is still writing, or was stopped; wait, or remove it"
            ) from None
        raise InvalidRolloutsError(f"{place}: expected a JSON object, got {error}") from error
    if not isinstance(value, dict):
        raise InvalidRolloutsError(f"{place}: expected a JSON object, got {type(value).__name__}")
    return value
