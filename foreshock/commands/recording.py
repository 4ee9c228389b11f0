"""A recorded run on disk: its files of steps, scalars and checkpoints.

Supported are

- a run's folder: `rollouts/`, `metrics.jsonl` (one object per line: `step` and numbers), `checkpoints/step_NNNN/`;
- a folder of steps, or single files: `step_NNNN.jsonl` or `.jsonl.gz`, `step_NNNN.parquet`, and several
  `step_NNNN_shard_K.parquet` of one step (Parquet in the schema of rollouts).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from foreshock.errors import ConfigurationError, InvalidRolloutsError
from foreshock.rollouts.attributes import BatchAttributes
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.jsonl import read_jsonl
from foreshock.rollouts.parquet import decode_rollouts

__all__ = ["Recording", "ShardFile", "find_recording", "read_scalars", "read_shard"]

_SHARD_NAME = re.compile(r"step_(?P<step>\d+)(?:_shard_(?P<shard>\d+))?\.(?P<kind>jsonl|jsonl\.gz|parquet)")
_CHECKPOINT_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file of rollouts: a complete step, or one shard of it."""

    path: Path
    step: int
    shard: int
    shards: int


@dataclass(frozen=True, slots=True)
class Recording:
    """The files of a run, ordered by step."""

    shards: tuple[ShardFile, ...]
    scalars: tuple[Path, ...]
    checkpoints: tuple[tuple[int, Path], ...]


def find_recording(paths: Iterable[Path], *, step: int | None = None) -> Recording:
    """Find the files in `paths`; `step` is the step of a single file without a step in its name.

    Raises ConfigurationError if a path is not supported, or if there are no rollouts.
    """
    files: list[Path] = []
    scalars: list[Path] = []
    checkpoints: list[tuple[int, Path]] = []
    for path in paths:
        if path.is_file():
            files.append(path)
            continue
        if not path.is_dir():
            raise ConfigurationError(f"no such file or folder: {str(path)!r}")
        folder = path / "rollouts" if (path / "rollouts").is_dir() else path
        files += [file for file in folder.iterdir() if _SHARD_NAME.fullmatch(file.name)]
        scalars += [path / "metrics.jsonl"] if (path / "metrics.jsonl").is_file() else []
        checkpoints += _checkpoints(path / "checkpoints")
    shards = _numbered(files, step)
    if not shards:
        raise ConfigurationError("no rollouts found; file names must be like step_0012.jsonl.gz or step_0012.parquet")
    return Recording(tuple(shards), tuple(scalars), tuple(sorted(checkpoints)))


def read_shard(file: ShardFile, attributes: BatchAttributes, *, check_values: bool = True) -> RolloutBatch:
    """Read and validate the rollouts of a file; `attributes` complete those of the file. Raises RolloutsError.

    With `check_values=False` only shapes are validated, not the values.
    """
    if file.path.suffix != ".parquet":
        return read_jsonl(file.path, step=file.step, attributes=attributes, check_values=check_values)
    try:
        return decode_rollouts(file.path.read_bytes(), check_values=check_values)
    except OSError as error:
        raise InvalidRolloutsError(f"{file.path.name!r} cannot be read: {error}") from error


def read_scalars(path: Path) -> list[tuple[int, Mapping[str, float]]]:
    """Read step and numbers of each line, ignoring other values. Raises ConfigurationError with the line number."""
    found: list[tuple[int, Mapping[str, float]]] = []
    for row, text in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            step = int(line.pop("step"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{path.name}, line {row + 1}: expected a JSON object with `step`: {error}"
            ) from error
        numbers = {
            name: math.nan if value is None else float(value)
            for name, value in line.items()
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        }
        if numbers:
            found.append((step, numbers))
    return found


def _numbered(files: Iterable[Path], step: int | None) -> list[ShardFile]:
    by_step: dict[int, list[tuple[int, Path]]] = {}
    for path in files:
        match = _SHARD_NAME.fullmatch(path.name)
        if match is None and step is None:
            raise ConfigurationError(
                f"no step in the file name {path.name!r}; name it like step_0012.parquet, or use --step"
            )
        number = int(match["step"]) if match is not None else int(step or 0)
        shard = int(match["shard"] or 0) if match is not None else 0
        by_step.setdefault(number, []).append((shard, path))
    return [
        ShardFile(path, number, index, len(in_step))
        for number, in_step in sorted(by_step.items())
        for index, (_, path) in enumerate(sorted(in_step))
    ]


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    named = [(_CHECKPOINT_NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir()]
    return [(int(match[1]), path) for match, path in named if match is not None and any(path.glob("*.safetensors"))]
