"""`foreshock import`: log a recorded run, or the dumps of a training framework, through the client, like a trainer.

Importing again changes nothing: the same files give the same bytes in the same attempt. A recorded run is

- a run's folder: `rollouts/`, `metrics.jsonl` (one object per line: `step` and numbers), `checkpoints/step_NNNN/`;
- a folder of steps, or single files: `step_NNNN.jsonl` or `.jsonl.gz`, `step_NNNN.parquet`, and several
  `step_NNNN_shard_K.parquet` of one step (`foreshock.rollouts.rollout_files`). A file of another name has its step
  elsewhere in the name (`rollouts-step=12.parquet`), its steps in a column `step`, or its step in `--step`.
"""

import argparse
import functools
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from foreshock.api.runs import LARGEST_STEP
from foreshock.client.client import Client
from foreshock.client.connection import run_url
from foreshock.client.reader import Reader
from foreshock.commands import import_dumps
from foreshock.commands.command import Command, add_service_options, connect
from foreshock.commands.option_types import COUNT, POSITIVE, STEP, filled
from foreshock.commands.queries import closing_import, wait_for_delivery
from foreshock.commands.text import Progress
from foreshock.diagnosis.quantities import recognised
from foreshock.diagnosis.wording import names_read, plural
from foreshock.errors import ConfigurationError, did_you_mean
from foreshock.importers import METRICS_ONLY, find_dumps
from foreshock.model_kind import MODEL_KINDS
from foreshock.page_addresses import DEFAULT_PROJECT
from foreshock.parsing import parse_json
from foreshock.rollouts.attributes import BatchAttributes
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.rollout_files import READABLE, Note, NoteLeftOut, read_rollout_file, step_of_file, steps_in_file

_SHARD_NAME = re.compile(r"step_\d+_shard_(\d+)\.(?:jsonl|jsonl\.gz|parquet)")
_SAME_NAMES: Mapping[str, str] = {}
_KINDS = (".jsonl", ".jsonl.gz", ".parquet")
_CHECKPOINT_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class ShardFile:
    """The rollouts of one step in a file: all of the step, or one shard of it."""

    path: Path
    step: int
    shard: int
    shards: int


@dataclass(frozen=True, slots=True)
class Recording:
    """The files of a run, ordered by step; `unread` are those in its folder whose step is unknown."""

    shards: tuple[ShardFile, ...]
    scalars: tuple[Path, ...]
    checkpoints: tuple[tuple[int, Path], ...]
    unread: tuple[Path, ...] = ()


def find_recording(
    paths: Iterable[Path], *, step: int | None = None, renamed: Mapping[str, str] = _SAME_NAMES
) -> Recording:
    """Find the files in `paths`; `step` is the step of a file without one in its name, `renamed` as for `read_shard`.

    Raises ConfigurationError if a path is not supported, or if there are no rollouts.
    """
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
        checkpoints += _checkpoints(path / "checkpoints")
    steps = {file: _steps_of(file, step, renamed) for file in (*files, *in_folders)}
    without = next((file for file in files if not steps[file]), None)
    if without is not None:
        raise ConfigurationError(
            f"no step in the file name {without.name!r} and no column `step`; name it like step_0012.parquet, name its "
            f"column by --map NAME=step, or use --step{METRICS_ONLY}"
        )
    shards = _numbered(steps)
    if not shards:
        raise ConfigurationError(
            f"no rollouts found; file names must be like step_0012.jsonl.gz or step_0012.parquet{METRICS_ONLY}"
        )
    unread = tuple(file for file in in_folders if not steps[file])
    return Recording(tuple(shards), tuple(scalars), tuple(sorted(checkpoints)), unread)


def read_shard(
    file: ShardFile,
    attributes: BatchAttributes,
    *,
    check_values: bool = True,
    note: Note | None = None,
    note_left_out: NoteLeftOut | None = None,
    renamed: Mapping[str, str] = _SAME_NAMES,
) -> RolloutBatch:
    """Read and validate the rollouts of a file. Raises RolloutsError; see `read_rollout_file`.

    `note`: default: print to standard error.
    """
    return read_rollout_file(
        file.path,
        step=file.step,
        attributes=attributes,
        check_values=check_values,
        note=note or partial(print, file=sys.stderr),
        note_left_out=note_left_out,
        renamed=renamed,
    )


def _steps_of(path: Path, step: int | None, renamed: Mapping[str, str]) -> list[int]:
    found = [step] if step is not None and step_of_file(path) is None else steps_in_file(path, renamed)
    for each in found:
        _check_step(each, path.name)
    return found


def read_scalars(path: Path) -> list[tuple[int, Mapping[str, float]]]:
    """Read step and numbers of each line, ignoring other values. Raises ConfigurationError with the line number."""
    found: list[tuple[int, Mapping[str, float]]] = []
    for row, text in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if not text.strip():
            continue
        try:
            line = parse_json(text)
            step = int(line.pop("step"))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ConfigurationError(
                f"{path.name}, line {row + 1}: expected a JSON object with `step`: {error}"
            ) from error
        _check_step(step, f"{path.name}, line {row + 1}")
        numbers = {
            name: math.nan if value is None else float(value)
            for name, value in line.items()
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        }
        if numbers:
            found.append((step, numbers))
    return found


def _numbered(steps: Mapping[Path, Iterable[int]]) -> list[ShardFile]:
    by_step: dict[int, list[tuple[int, Path]]] = {}
    for path, of_path in steps.items():
        match = _SHARD_NAME.fullmatch(path.name)
        for number in of_path:
            by_step.setdefault(number, []).append((int(match[1]) if match is not None else 0, path))
    return [
        ShardFile(path, number, index, len(in_step))
        for number, in_step in sorted(by_step.items())
        for index, (_, path) in enumerate(sorted(in_step))
    ]


def _check_step(step: int, place: str) -> None:
    if not 0 <= step <= LARGEST_STEP:
        raise ConfigurationError(f"a step must be from 0 to {LARGEST_STEP}, got {step} in {place}")


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    named = [(_CHECKPOINT_NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir()]
    return [(int(match[1]), path) for match, path in named if match is not None and any(path.glob("*.safetensors"))]


_DESCRIBED = ("name", "model", "trainer", "engine", "hardware")
_ATTEMPT_KEY = "import"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a run's folder, or files of rollouts")
    parser.add_argument("--run-key", required=True, type=filled, help="your permanent name for the run")
    parser.add_argument("--project", default=DEFAULT_PROJECT)
    for name in _DESCRIBED:
        parser.add_argument(f"--{name}", help=f"the run's {name}")
    parser.add_argument(
        "--model-kind", choices=MODEL_KINDS, help="whose healthy ranges hold (default: the checkpoint's)"
    )
    parser.add_argument("--initial-learning-rate", type=POSITIVE, metavar="RATE")
    parser.add_argument("--length-cap", type=COUNT, metavar="TOKENS", help="longest response that generation allowed")
    parser.add_argument("--step", type=STEP, metavar="N", help="the step of a file without a step in its name")
    parser.add_argument(
        "--map", action="append", default=[], type=_renamed, metavar="NAME=COLUMN",
        help="read the column NAME of the files as COLUMN of the rollout table, `group` or `step`; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--weights-root", metavar="NAME=FOLDER", help="announce checkpoints below FOLDER, which workers know as NAME"
    )
    import_dumps.add_sampling_options(parser)
    parser.add_argument("--unfinished", action="store_true", help="do not mark the run as finished")
    import_dumps.add_dump_options(parser)
    add_service_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Import. Raises ConfigurationError, RolloutsError, ServiceError."""
    attributes = import_dumps.sampling_attributes(arguments, length_cap=arguments.length_cap)
    chosen = import_dumps.chosen_format(arguments)
    if chosen is not None:
        if not arguments.follow:
            # Check them before a run is made for them.
            find_dumps(chosen.name, arguments.paths[0])
        with connect(arguments) as reader:
            client = _client(reader, arguments)
            start = partial(_start, client, attributes, arguments, trainer=chosen.framework)
            return import_dumps.import_dumps(client, reader, chosen, attributes, arguments, start)
    recording = find_recording(arguments.paths, step=arguments.step, renamed=dict(arguments.map))
    root = _weights_root(arguments.weights_root)
    with connect(arguments) as reader:
        client = _client(reader, arguments)
        with closing_import(client, reader, unfinished=arguments.unfinished):
            _log(client, recording, attributes, arguments, root)
            wait_for_delivery(client)
            if not arguments.unfinished:
                client.finish()
                wait_for_delivery(client)
        counters = client.counters.snapshot()
        print(
            f"{plural(len(recording.shards), 'shard')} of rollouts imported, {counters.duplicates} of them already "
            f"stored; run {client.run_id}: {run_url(reader.connection.url, client.project, client.run_key)}"
        )
    return 0


def _client(reader: Reader, arguments: argparse.Namespace) -> Client:
    # Without a service the import fails at once instead of spooling.
    reader.connection.request("GET", "/livez")
    return Client(
        arguments.url,
        arguments.project,
        arguments.run_key,
        api_key=arguments.api_key,
        attempt_key=_ATTEMPT_KEY,
        strict=True,
        block_when_full=True,
        max_queue_items=64,
        export="",
    )


def _start(
    client: Client, attributes: BatchAttributes, arguments: argparse.Namespace, *, trainer: str | None = None
) -> None:
    description: dict[str, Any] = {name: getattr(arguments, name) for name in _DESCRIBED}
    client.start_run(
        **{**description, "trainer": arguments.trainer or trainer},
        initial_learning_rate=arguments.initial_learning_rate,
        length_cap=arguments.length_cap,
        model_kind=arguments.model_kind,
        attributes=attributes,
    )


def _log(
    client: Client,
    recording: Recording,
    attributes: BatchAttributes,
    arguments: argparse.Namespace,
    root: tuple[str, Path] | None,
) -> None:
    # Before a run is made: files that cannot be read must not leave an empty one, which would be the newest.
    scalars = [each for path in recording.scalars for each in read_scalars(path)]
    left_out: list[tuple[int, str]] = []
    read = partial(
        read_shard,
        attributes=attributes,
        note=functools.cache(print),
        note_left_out=lambda count, sentence: left_out.append((count, sentence)),
        renamed=dict(arguments.map),
    )
    for skipped in recording.unread:
        print(f"not read: {skipped.name}, whose step is unknown; use --step, or write its step into the name")
    first = read(recording.shards[0])
    paths = [_below(root[1], folder) for _, folder in recording.checkpoints] if root is not None else []
    if scalars:
        names = recognised(name for _, values in scalars for name in values)
        print("\n".join(names_read("metrics.jsonl", *names)))
    _start(client, attributes, arguments)
    for step, values in scalars:
        client.log_scalars(step, values)
    if root is not None:
        for (step, folder), path in zip(recording.checkpoints, paths, strict=True):
            client.log_checkpoint(step, root=root[0], path=path, local_folder=folder)
    elif recording.checkpoints:
        print(f"not announced: {plural(len(recording.checkpoints), 'checkpoint')}; use --weights-root NAME=FOLDER")
    progress = Progress("reading rollouts", len(recording.shards))
    for index, file in enumerate(recording.shards):
        batch = read(file) if index else first
        while left_out:
            count, sentence = left_out.pop()
            print(sentence)
            client.note_left_out(count, sentence)
        client.log_rollouts(file.step, batch, shard=file.shard, shards=file.shards, copy=False)
        progress.show(index + 1)


def _renamed(text: str) -> tuple[str, str]:
    """Return a name and the column of `--map`. Raises argparse.ArgumentTypeError."""
    name, found, column = text.partition("=")
    if not (name and found) or column not in READABLE:
        raise argparse.ArgumentTypeError(
            f"must be NAME=COLUMN{did_you_mean(column, READABLE)}, got {text!r}; columns: {', '.join(READABLE)}"
        )
    return name, column


def _weights_root(option: str | None) -> tuple[str, Path] | None:
    if option is None:
        return None
    name, found, folder = option.partition("=")
    if not (name and found and Path(folder).is_dir()):
        raise ConfigurationError(f"--weights-root must be NAME=FOLDER with an existing folder, got {option!r}")
    return name, Path(folder).resolve()


def _below(root: Path, folder: Path) -> str:
    try:
        return folder.resolve().relative_to(root).as_posix()
    except ValueError as error:
        raise ConfigurationError(
            f"checkpoint {folder} must be below the weights root {root}; choose another --weights-root"
        ) from error


command = Command(
    "log a recorded run (step_NNNN.jsonl.gz or .parquet, metrics.jsonl, checkpoints) or a framework's dumps",
    configure,
    run,
)
