"""Readers of recorded runs, which find a file's format from its content. Rows of one step are merged, later ones win.

The formats are CSV and JSON lines of any trainer, the console logs of verl and slime, verl's file logger (`{"step",
"data"}`), TRL's trainer_state.json, the metrics of prime-rl and NeMo-RL, W&B (CSV export, history as CSV or JSON) and
TensorBoard.

TensorBoard's files are event files, a folder of them, or CSV exports. A record of an event file is a length (uint64),
the length's checksum, the bytes of a protobuf `Event`, and their checksum (TFRecord). Of an event only the step and the
scalar summaries are read: `simple_value` (TensorBoard 1, torch) and tensors of one number (TensorBoard 2). The last
record of a run that was killed may be cut: reading ends there.
"""

import csv
import io
import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from foreshock.diagnosis.detectors import ClosedStep
from foreshock.diagnosis.quantities import STEP_NAMES, quantities_of
from foreshock.errors import ForeshockError

_NUMBER = r"(?:np\.float\d+\()?(-?[\d.]+(?:[eE][-+]?\d+)?)"
_VERL_STEP = re.compile(r"\bstep:(\d+) - (.+)")
_VERL_VALUE = re.compile(rf"([^\s:]+):{_NUMBER}")
# slime: the rollouts' scalars and the trainer's are lines of their own, each a printed dict.
_SLIME_STEP = re.compile(r"\b(?:step|rollout|perf) (\d+): (\{'.+)")
_SLIME_VALUE = re.compile(rf"'([^']+)': {_NUMBER}")
_CONSOLES = ((_VERL_STEP, _VERL_VALUE), (_SLIME_STEP, _SLIME_VALUE))
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
    for line, value in _CONSOLES:
        if line.search(text):
            yield from _console_rows(text.splitlines(), line, value)
            return
    yield from _json_rows(text) if text.lstrip()[:1] in ("{", "[") else _csv_rows(path, text)


def _json_rows(text: str) -> Iterator[tuple[int, dict[str, float]]]:
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
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


def _console_rows(
    lines: Iterable[str], step: re.Pattern[str], value: re.Pattern[str]
) -> Iterator[tuple[int, dict[str, float]]]:
    for line in lines:
        found = step.search(line)
        if found:
            yield int(found[1]), {name: float(number) for name, number in value.findall(found[2])}


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

_HEADER = struct.Struct("<QI")
_CHECKSUM_BYTES = 4
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# Field numbers of tensorflow's event.proto, summary.proto and tensor.proto.
_EVENT_STEP, _EVENT_SUMMARY = 2, 5
_SUMMARY_VALUE = 1
_VALUE_TAG, _VALUE_SIMPLE, _VALUE_TENSOR = 1, 2, 8
_TENSOR_DTYPE, _TENSOR_CONTENT, _TENSOR_FLOATS, _TENSOR_DOUBLES = 1, 4, 5, 6
_FORMATS = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}
"""DT_FLOAT, DT_DOUBLE, DT_INT32 and DT_INT64."""


def event_files(path: Path) -> list[Path]:
    """Return the event files at or below a path, by name; empty if there are none."""
    if path.is_dir():
        return sorted(each for each in path.rglob(f"*{MARK}*") if each.is_file())
    return [path] if MARK in path.name else []


def scalars_of(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, values by tag) of each event that has scalars."""
    for record in _records(path.read_bytes()):
        step, values = 0, dict[str, float]()
        try:
            for number, value in _fields(record):
                if number == _EVENT_STEP and isinstance(value, int):
                    step = value
                elif number == _EVENT_SUMMARY and isinstance(value, bytes):
                    values |= dict(_summary(value))
        except (IndexError, struct.error, UnicodeDecodeError):
            # Not an event: a record that this reader does not know.
            continue
        if values and 0 <= step < 2**62:
            yield step, values


def _records(data: bytes) -> Iterator[bytes]:
    place = 0
    while place + _HEADER.size <= len(data):
        length, _ = _HEADER.unpack_from(data, place)
        place += _HEADER.size
        if place + length + _CHECKSUM_BYTES > len(data):
            return
        yield data[place : place + length]
        place += length + _CHECKSUM_BYTES


def _summary(data: bytes) -> Iterator[tuple[str, float]]:
    for number, value in _fields(data):
        if number != _SUMMARY_VALUE or not isinstance(value, bytes):
            continue
        tag, scalar = "", None
        for inner, each in _fields(value):
            if inner == _VALUE_TAG and isinstance(each, bytes):
                tag = each.decode()
            elif inner == _VALUE_SIMPLE and isinstance(each, bytes):
                scalar = float(struct.unpack("<f", each)[0])
            elif inner == _VALUE_TENSOR and isinstance(each, bytes):
                scalar = _number_of_tensor(each)
        if tag and scalar is not None:
            yield tag, scalar


def _number_of_tensor(tensor: bytes) -> float | None:
    """Return the number of a tensor of one number, else None."""
    dtype, found = 0, None
    for number, value in _fields(tensor):
        if number == _TENSOR_DTYPE and isinstance(value, int):
            dtype = value
        elif number in (_TENSOR_CONTENT, _TENSOR_FLOATS, _TENSOR_DOUBLES) and isinstance(value, bytes):
            found = value
    layout = _FORMATS.get(dtype)
    if layout is None or found is None or len(found) != struct.calcsize(layout):
        return None
    return float(struct.unpack(layout, found)[0])


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a protobuf message; numbers of fixed size as their bytes. Raises IndexError."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, place = _varint(data, place)
            yield number, value
            continue
        if kind == _BYTES:
            length, place = _varint(data, place)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise IndexError(f"unknown wire type {kind}")
        if place + length > len(data):
            raise IndexError("a field is longer than its message")
        yield number, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
        if shift > 63:
            raise IndexError("a number is longer than 64 bits")
