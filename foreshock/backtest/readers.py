"""Readers of recorded runs, which find a file's format from its content. Rows of one step are merged, later ones win.

The formats are CSV and JSON lines of any trainer, the console logs of verl and slime, verl's file logger (`{"step",
"data"}`), TRL's trainer_state.json, the metrics of prime-rl and NeMo-RL, W&B (CSV export, history as CSV or JSON) and
TensorBoard.

TensorBoard's files are event files, a folder of them, or CSV exports. The last record of an event file may be cut, if
the run was killed: reading ends there.
"""

import csv
import io
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.detectors import ClosedStep
from foreshock.diagnosis.quantities import LENGTH_KEY, REWARD_KEY, STEP_NAMES, quantities_of, recognised
from foreshock.errors import ConfigurationError, ForeshockError
from foreshock.installing import install_command
from foreshock.parsing import parse_json

_NUMBER = r"(?:np\.float\d+\()?(-?[\d.]+(?:[eE][-+]?\d+)?)"
_VERL_STEP = re.compile(r"\bstep:(\d+) - (.+)")
_VERL_VALUE = re.compile(rf"([^\s:]+):{_NUMBER}")
# slime: the rollouts' scalars and the trainer's are lines of their own, each a printed dict.
_SLIME_STEP = re.compile(r"\b(?:step|rollout|perf) (\d+): (\{'.+)")
_SLIME_VALUE = re.compile(rf"'([^']+)': {_NUMBER}")
_CONSOLES = ((_VERL_STEP, _VERL_VALUE), (_SLIME_STEP, _SLIME_VALUE))
_TENSORBOARD_COLUMNS = ["Wall time", "Step", "Value"]


class UnreadableRun(ForeshockError):
    """A file that is not a record of a run: no step column, or neither a reward nor a length nor a mismatch."""


@dataclass(frozen=True, slots=True)
class Record:
    """A recorded run: its steps, the name that each quantity was read from, and the scalars that were not read."""

    steps: list[ClosedStep]
    read: Mapping[str, str]
    unread: tuple[str, ...]


def read_run(path: Path) -> list[ClosedStep]:
    """Return the steps of a recorded run. Raises UnreadableRun."""
    return read_record(path).steps


def read_record(path: Path) -> Record:
    """Return a recorded run with the names of its scalars. Raises UnreadableRun.

    A run with neither a reward nor a length nor a mismatch is refused: no rule could warn of it.
    """
    merged: defaultdict[int, dict[str, float]] = defaultdict(dict)
    try:
        events = event_files(path)
        if path.is_dir() and not events:
            raise UnreadableRun(f"{path} is a folder without TensorBoard event files; expected a file or such a folder")
        found = (
            chain.from_iterable(scalars_of(each) for each in events)
            if events
            else _rows(path, path.read_text(encoding="utf-8", errors="replace"))
        )
        for step, scalars in found:
            merged[step] |= {name: value for name, value in scalars.items() if math.isfinite(value)}
    except OSError as error:
        raise UnreadableRun(f"cannot read {path}: {error.strerror}") from error
    steps = [ClosedStep(step, quantities_of(scalars)) for step, scalars in sorted(merged.items())]
    read, unread = recognised({name for scalars in merged.values() for name in scalars} - {*STEP_NAMES})
    if not any(each in (REWARD_KEY, LENGTH_KEY) or each.startswith(f"{TRAINER_ROLLOUT}:") for each in read):
        known = f"only {', '.join(read.values())} is known" if read else "no name is known"
        others = f"; not known: {shorten(', '.join(unread), 200)}" if unread else ""
        raise UnreadableRun(
            f"{path} has no step with a reward, a length or a mismatch: {known}{others}. Expected a step column "
            f"({', '.join(STEP_NAMES)}) and names such as response_length/mean and reward"
        )
    return Record(steps, read, unread)


def _rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, float]]]:
    for line, value in _CONSOLES:
        if line.search(text):
            for found in filter(None, map(line.search, text.splitlines())):
                yield int(found[1]), {name: float(number) for name, number in value.findall(found[2])}
            return
    yield from _json_rows(text) if text.lstrip()[:1] in ("{", "[") else _csv_rows(path, text)


def _json_rows(text: str) -> Iterator[tuple[int, dict[str, float]]]:
    try:
        whole = parse_json(text)
    except ValueError:
        whole = list(_json_lines(text))
    if isinstance(whole, Mapping):
        yield from _series(whole)
        whole = whole.get("log_history", [whole])
    for record in whole:
        # verl's file logger keeps the values apart from the step.
        data = record.get("data") if isinstance(record, Mapping) else None
        yield from _row({**record, **data} if isinstance(data, Mapping) else record)


def _series(whole: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the values of {name: {step: value}}, as NeMo-RL's tests write TensorBoard's series."""
    for name, series in whole.items():
        for step, value in series.items() if isinstance(series, Mapping) else ():
            number = _number(value)
            if step.isdigit() and number is not None:
                yield int(step), {name: number}


def _json_lines(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        # The last line of a run that was killed may be half a line.
        try:
            yield parse_json(line)
        except ValueError:
            continue


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, float]]]:
    reader = csv.DictReader(io.StringIO(text))
    columns = list(reader.fieldnames or ())
    if columns == _TENSORBOARD_COLUMNS:
        # One tag a file: run_<name>-tag-<tag with _ for />.csv.
        tag = path.stem.rpartition("-tag-")[2]
        possible = (tag, tag.replace("_", "/"), tag.replace("_", "/", 1))
        name = next((each for each in possible if quantities_of({each: 0.0})), tag)
        for row in reader:
            value = _number(row["Value"])
            if value is not None:
                yield int(float(row["Step"])), {name: value}
        return
    for row in reader:
        # W&B writes "name of the run - metric", and __MIN and __MAX columns beside it.
        plain = {
            name.rpartition(" - ")[2]: value
            for name, value in row.items()
            if name and not name.endswith(("__MIN", "__MAX"))
        }
        yield from _row(plain)


def _row(record: Any) -> Iterator[tuple[int, dict[str, float]]]:
    if not isinstance(record, Mapping):
        return
    numbers = {name: number for name, value in record.items() if (number := _number(value)) is not None}
    step = next((numbers[name] for name in STEP_NAMES if name in numbers), None)
    if step is not None and step >= 0:
        yield int(step), numbers


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


MARK = "tfevents"
"""Part of the name of every event file."""


def event_files(path: Path) -> list[Path]:
    """Return the event files at or below a path, by name; empty if there are none."""
    if path.is_dir():
        return sorted(each for each in path.rglob(f"*{MARK}*") if each.is_file())
    return [path] if MARK in path.name else []


def scalars_of(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, values by tag) of each event that has scalars, until a record is cut or broken.

    Raises ConfigurationError if TensorBoard is not installed.
    """
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise ConfigurationError(
            f"{path} is an event file of TensorBoard, which is not installed; run: {install_command('tensorboard')}"
        ) from error
    for event in EventFileLoader(str(path)).Load():
        # The loader turns the plain numbers of older writers into tensors.
        tensors = {value.tag: value.tensor for value in event.summary.value if value.HasField("tensor")}
        arrays = {tag: make_ndarray(tensor) for tag, tensor in tensors.items()}
        values = {tag: float(array) for tag, array in arrays.items() if array.size == 1 and array.dtype.kind in "fiu"}
        if values:
            yield event.step, values
