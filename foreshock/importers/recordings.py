"""Recorded runs: a run's folder, a folder of steps, or single files.

- a run's folder: `rollouts/`, `metrics.jsonl` (one object per line: `step` and numbers), `checkpoints/step_NNNN/`;
- a folder of steps, or single files: `step_NNNN.jsonl` or `.jsonl.gz`, `step_NNNN.parquet`, and several
  `step_NNNN_shard_K.parquet` of one step (`foreshock.rollouts.rollout_files`). A file of another name has its step
  elsewhere in the name (`rollouts-step=12.parquet`), its steps in a column `step`, or its step in `--step`.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from foreshock.api.runs import LARGEST_STEP
from foreshock.errors import ConfigurationError
from foreshock.importers.dumps import METRICS_ONLY, Dump, ImportedStep, ReadOptions
from foreshock.parsing import parse_json
from foreshock.rollouts.rollout_files import read_rollout_file, step_of_file, steps_in_file

_SHARD_NAME = re.compile(r"step_\d+_shard_(\d+)\.(?:jsonl|jsonl\.gz|parquet)")
_KINDS = (".jsonl", ".jsonl.gz", ".parquet")
_CHECKPOINT_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class Recording:
    """The files of a run by step, each a shard; `unread` are those in its folder whose step is unknown."""

    dumps: tuple[Dump, ...]
    scalars: tuple[Path, ...]
    checkpoints: tuple[tuple[int, Path], ...]
    unread: tuple[Path, ...] = ()


def find_recording(paths: Iterable[Path], *, step: int | None = None, options: ReadOptions | None = None) -> Recording:
    """Find the files in `paths`; `step` is the step of a file without one in its name.

    Raises ConfigurationError if a path is not supported, or if there are no rollouts.
    """
    renamed = (options or ReadOptions()).renamed
    files: list[Path] = []
    in_folders: list[Path] = []
    scalars: list[Path] = []
    checkpoints: list[tuple[int, Path]] = []
    for path in paths:
        if path.is_file():
            files.append(path)
            continue
        if not path.is_dir():
            raise ConfigurationError(f"no such file or folder: {str(path)!r}")
        folder = path / "rollouts" if (path / "rollouts").is_dir() else path
        in_folders += (
            file for file in sorted(folder.iterdir()) if file.name.endswith(_KINDS) and file.name != "metrics.jsonl"
        )
        scalars += [path / "metrics.jsonl"] if (path / "metrics.jsonl").is_file() else []
        checkpoints += (
            (int(match[1]), weights)
            for weights in (path / "checkpoints").glob("step_*/")
            if (match := _CHECKPOINT_NAME.fullmatch(weights.name)) and any(weights.glob("*.safetensors"))
        )
    shards: defaultdict[int, list[tuple[int, Path]]] = defaultdict(list)
    unread = []
    for file in (*files, *in_folders):
        found = [step] if step is not None and step_of_file(file) is None else steps_in_file(file, renamed)
        shard = _SHARD_NAME.fullmatch(file.name)
        for each in found:
            shards[_checked_step(each, file.name)].append((0 if shard is None else int(shard[1]), file))
        if not found and file in files:
            raise ConfigurationError(
                f"no step in the file name {file.name!r} and no column `step`; name it like step_0012.parquet, name "
                f"its column by --map NAME=step, or use --step{METRICS_ONLY}"
            )
        unread += [] if found else [file]
    if not shards:
        raise ConfigurationError(
            f"no rollouts found; file names must be like step_0012.jsonl.gz or step_0012.parquet{METRICS_ONLY}"
        )
    dumps = [Dump(number, tuple(file for _, file in sorted(in_step))) for number, in_step in sorted(shards.items())]
    return Recording(tuple(dumps), tuple(scalars), tuple(sorted(checkpoints)), tuple(unread))


def read_recorded(dump: Dump, options: ReadOptions) -> ImportedStep:
    """Read a step, one shard per file. Raises RolloutsError; see `read_rollout_file`."""
    notes: list[str] = []
    left_out: list[tuple[int, str]] = []
    batches = [
        read_rollout_file(
            file, step=dump.step, attributes=options.attributes, limits=options.limits,
            check_values=options.check_values, note=notes.append,
            note_left_out=lambda count, sentence: left_out.append((count, sentence)), renamed=options.renamed,
        )
        for file in dump.files
    ]  # fmt: skip
    return ImportedStep(dump.step, tuple(batches), notes=tuple(notes), left_out=tuple(left_out))


def read_scalars(path: Path) -> list[tuple[int, Mapping[str, float]]]:
    """Read step and numbers of each line, ignoring other values. Raises ConfigurationError with the line number."""
    found: list[tuple[int, Mapping[str, float]]] = []
    for row, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not text.strip():
            continue
        place = f"{path.name}, line {row}"
        try:
            line = parse_json(text)
            step = int(line.pop("step"))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ConfigurationError(f"{place}: expected a JSON object with `step`: {error}") from error
        numbers = {
            name: math.nan if value is None else float(value)
            for name, value in line.items()
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        }
        found += [(_checked_step(step, place), numbers)] if numbers else []
    return found


def _checked_step(step: int, place: str) -> int:
    if not 0 <= step <= LARGEST_STEP:
        raise ConfigurationError(f"a step must be from 0 to {LARGEST_STEP}, got {step} in {place}")
    return step
