"""Files of recorded runs: CSV, JSON lines, trainer_state.json of TRL, verl's console log, W&B, TensorBoard.

TensorBoard's are event files, a folder of them, or CSV exports.

The format is found by the content. Rows of one step are merged, later ones first; steps are sorted.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from foreshock.backtest.event_files import event_files, scalars_of
from foreshock.diagnosis.detectors import ClosedStep
from foreshock.diagnosis.quantities import STEP_NAMES, quantities_of
from foreshock.errors import ForeshockError

_VERL_STEP = re.compile(r"\bstep:(\d+) - (.+)")
_VERL_VALUE = re.compile(r"([^\s:]+):(?:np\.float\d+\()?(-?[\d.]+(?:[eE][-+]?\d+)?|nan|-?inf)")
_TENSORBOARD_COLUMNS = ["Wall time", "Step", "Value"]


class UnreadableRun(ForeshockError):
    """A file that is no record of a run: no step column, or no quantity of the detectors."""


def read_run(path: Path) -> list[ClosedStep]:
    """Return the steps of a recorded run. Raises UnreadableRun."""
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
    if not any(step.values for step in steps):
        raise UnreadableRun(
            f"{path} has no step with a known quantity; expected a step column "
            f"({', '.join(STEP_NAMES)}) and names such as response_length/mean and reward"
        )
    return steps


def _rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, float]]]:
    first = text.lstrip()[:1]
    if first == "{":
        yield from _json_rows(text)
    elif _VERL_STEP.search(text):
        yield from _verl_rows(text.splitlines())
    else:
        yield from _csv_rows(path, text)


def _json_rows(text: str) -> Iterator[tuple[int, dict[str, float]]]:
    try:
        whole = json.loads(text)
        records = whole.get("log_history", [whole])
    except json.JSONDecodeError:
        records = list(_json_lines(text))
    for record in records:
        yield from _row(record)


def _json_lines(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        # The last line of a run that was killed may be half a line.
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, float]]]:
    reader = csv.DictReader(io.StringIO(text))
    columns = list(reader.fieldnames or ())
    if columns == _TENSORBOARD_COLUMNS:
        # One tag a file: run_<name>-tag-<tag with _ for />.csv.
        tag = path.stem.rpartition("-tag-")[2]
        known = [tag, tag.replace("_", "/"), tag.replace("_", "/", 1)]
        for row in reader:
            value = _number(row["Value"])
            if value is not None:
                yield int(float(row["Step"])), dict.fromkeys(known, value)
        return
    for row in reader:
        # W&B writes "name of the run - metric", and __MIN and __MAX columns beside it.
        plain = {
            name.rpartition(" - ")[2]: value
            for name, value in row.items()
            if name and not name.endswith(("__MIN", "__MAX"))
        }
        yield from _row(plain)


def _verl_rows(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, float]]]:
    for line in lines:
        found = _VERL_STEP.search(line)
        if found:
            values = {name: float(value) for name, value in _VERL_VALUE.findall(found[2])}
            yield int(found[1]), {name: value for name, value in values.items() if math.isfinite(value)}


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
