"""`foreshock import`: log a recorded run, or the dumps of a training framework, through the client, like a trainer.

Importing again changes nothing: the same files give the same bytes in the same attempt. A recorded run is

- a run's folder: `rollouts/`, `metrics.jsonl` (one object per line: `step` and numbers), `checkpoints/step_NNNN/`;
- a folder of steps, or single files: `step_NNNN.jsonl` or `.jsonl.gz`, `step_NNNN.parquet`, and several
  `step_NNNN_shard_K.parquet` of one step, with the columns of the rollout table. A file of another name has its step
  elsewhere in the name (`rollouts-step=12.parquet`), in a column `step`, or in `--step`.
"""

import argparse
import contextlib
import functools
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from foreshock.api.runs import LARGEST_STEP
from foreshock.backtest.cells import names_read
from foreshock.client.client import Client
from foreshock.client.connection import run_url
from foreshock.client.reader import Reader
from foreshock.commands.command import add_service_options, connect
from foreshock.commands.import_dumps import (
    add_dump_options,
    add_sampling_options,
    chosen_format,
    import_dumps,
    sampling_attributes,
)
from foreshock.commands.option_types import COUNT, POSITIVE, STEP, filled
from foreshock.commands.queries import closing_import, wait_for_delivery
from foreshock.commands.text import Progress
from foreshock.diagnosis.quantities import recognised
from foreshock.diagnosis.wording import plural
from foreshock.errors import ConfigurationError, InvalidRolloutsError
from foreshock.importers import METRICS_ONLY, find_dumps
from foreshock.model_kind import MODEL_KINDS
from foreshock.page_addresses import DEFAULT_PROJECT
from foreshock.parsing import parse_json
from foreshock.rollouts.attributes import BatchAttributes
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.jsonl import read_jsonl, step_in_file
from foreshock.rollouts.parquet import decode_rollouts
from foreshock.rollouts.parquet_files import ROLLOUTS_PER_ROW_GROUP, arrow_errors
from foreshock.rollouts.schema import ROLLOUT_COLUMNS

_SHARD_NAME = re.compile(r"step_(?P<step>\d+)(?:_shard_(?P<shard>\d+))?\.(?P<kind>jsonl|jsonl\.gz|parquet)")
_KINDS = (".jsonl", ".jsonl.gz", ".parquet")
_STEP_IN_NAME = re.compile(r"(?:^|[^a-zA-Z])step[_=-]?(\d+)", re.IGNORECASE)
_PARQUET_MAGIC = b"PAR1"
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
    """The files of a run, ordered by step; `unread` are those in its folder whose step is unknown."""

    shards: tuple[ShardFile, ...]
    scalars: tuple[Path, ...]
    checkpoints: tuple[tuple[int, Path], ...]
    unread: tuple[Path, ...] = ()


def find_recording(paths: Iterable[Path], *, step: int | None = None) -> Recording:
    """Find the files in `paths`; `step` is the step of a single file without a step in its name.

    Raises ConfigurationError if a path is not supported, or if there are no rollouts.
    """
    files: list[Path] = []
    unread: list[Path] = []
    scalars: list[Path] = []
    checkpoints: list[tuple[int, Path]] = []
    for path in paths:
        if path.is_file():
            files.append(path)
            continue
        if not path.is_dir():
            raise ConfigurationError(f"no such file or folder: {str(path)!r}")
        folder = path / "rollouts" if (path / "rollouts").is_dir() else path
        for file in sorted(folder.iterdir()):
            if file.name.endswith(_KINDS) and file.name != "metrics.jsonl":
                (unread if _step_of(file) is None else files).append(file)
        scalars += [path / "metrics.jsonl"] if (path / "metrics.jsonl").is_file() else []
        checkpoints += _checkpoints(path / "checkpoints")
    shards = _numbered(files, step)
    if not shards:
        raise ConfigurationError(
            f"no rollouts found; file names must be like step_0012.jsonl.gz or step_0012.parquet{METRICS_ONLY}"
        )
    return Recording(tuple(shards), tuple(scalars), tuple(sorted(checkpoints)), tuple(unread))


def read_shard(
    file: ShardFile,
    attributes: BatchAttributes,
    *,
    check_values: bool = True,
    note: Callable[[str], object] | None = None,
) -> RolloutBatch:
    """Read and validate the rollouts of a file; `attributes` complete those of the file. Raises RolloutsError.

    With `check_values=False` only shapes are validated, not the values. `note`: see `read_jsonl`.
    """
    try:
        if file.path.suffix != ".parquet":
            return read_jsonl(file.path, step=file.step, attributes=attributes, check_values=check_values, note=note)
        return decode_rollouts(_completed_parquet(file, note), check_values=check_values)
    except InvalidRolloutsError as error:
        if file.path.name in error.message or (error.row is None and file.path.suffix != ".parquet"):
            raise
        message = f"{error.message}, in {file.path.name}"
        raise InvalidRolloutsError(message, row=error.row, column=error.column) from error
    except OSError as error:
        raise InvalidRolloutsError(f"{file.path.name!r} cannot be read: {error}") from error


def _completed_parquet(file: ShardFile, note: Callable[[str], object] | None) -> bytes:
    """Return a Parquet file with sample ids, and with `note` without the columns that are not of the rollout table.

    `note` gets their names. Raises InvalidRolloutsError if a column `step` has another step.
    """
    data = _parquet_of(file.path)
    known = {column.name for column in ROLLOUT_COLUMNS}
    with arrow_errors():
        names = pq.read_schema(pa.BufferReader(data)).names
        unread = [name for name in names if name not in known]
        if "sample_id" in names and (not unread or (note is None and "step" not in names)):
            return data
        steps = set(pq.read_table(pa.BufferReader(data), columns=["step"])[0].to_pylist()) if "step" in names else set()
        if steps - {file.step}:
            raise InvalidRolloutsError(
                f"has {sorted(each for each in steps if each is not None)}: write a file for each step", column="step"
            )
        others = [name for name in unread if name != "step"]
        if others and note is not None:
            note(f"not read from the Parquet files: {', '.join(others)}; columns: {', '.join(sorted(known))}")
        kept = [name for name in names if name in known or (note is None and name in others)]
        table = pq.read_table(pa.BufferReader(data), columns=kept)
        if "sample_id" not in names:
            first = f"step-{file.step:04d}-shard-{file.shard}-sample"
            table = table.append_column("sample_id", pa.array([f"{first}-{row}" for row in range(table.num_rows)]))
        sink = io.BytesIO()
        pq.write_table(table, sink, row_group_size=ROLLOUTS_PER_ROW_GROUP, compression="none")
    return sink.getvalue()


def _step_of(path: Path) -> int | None:
    """Return the step in a file's name, or in its column `step`; None if neither has one."""
    match = _SHARD_NAME.fullmatch(path.name) or _STEP_IN_NAME.search(path.name)
    if match is not None:
        return int(match[1])
    if path.suffix != ".parquet":
        return step_in_file(path)
    with contextlib.suppress(pa.ArrowException, OSError):
        file = pq.ParquetFile(path)
        if "step" in file.schema_arrow.names and file.metadata.num_rows:
            return int(file.read_row_group(0, columns=["step"])[0][0].as_py())
    return None


def _parquet_of(path: Path) -> bytes:
    """Return the bytes of a Parquet file. Raises InvalidRolloutsError if it is not one."""
    data = path.read_bytes()
    if data.startswith(_PARQUET_MAGIC) and len(data) > len(_PARQUET_MAGIC) and data.endswith(_PARQUET_MAGIC):
        return data
    if not data or data.startswith(_PARQUET_MAGIC):
        raise InvalidRolloutsError(f"{path.name} is empty or cut off: expected a Parquet file")
    raise InvalidRolloutsError(f"{path.name} is not a Parquet file")


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


def _numbered(files: Iterable[Path], step: int | None) -> list[ShardFile]:
    by_step: dict[int, list[tuple[int, Path]]] = {}
    for path in files:
        match = _SHARD_NAME.fullmatch(path.name)
        number = _step_of(path) if step is None or match is not None else step
        if number is None:
            raise ConfigurationError(
                f"no step in the file name {path.name!r} and no column `step`; name it like step_0012.parquet, or use "
                f"--step{METRICS_ONLY}"
            )
        _check_step(number, path.name)
        shard = int(match["shard"] or 0) if match is not None else 0
        by_step.setdefault(number, []).append((shard, path))
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


class ImportCommand:
    """Reads files, logs them, and waits until the service has stored them."""

    help = "log a recorded run (step_NNNN.jsonl.gz or .parquet, metrics.jsonl, checkpoints) or a framework's dumps"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a run's folder, or files of rollouts")
        parser.add_argument("--run-key", required=True, type=filled, help="your permanent name for the run")
        parser.add_argument("--project", default=DEFAULT_PROJECT)
        for name in _DESCRIBED:
            parser.add_argument(f"--{name}", help=f"the run's {name}")
        parser.add_argument(
            "--model-kind", choices=MODEL_KINDS, help="whose healthy ranges hold (default: the checkpoint's)"
        )
        parser.add_argument("--initial-learning-rate", type=POSITIVE, metavar="RATE")
        parser.add_argument(
            "--length-cap", type=COUNT, metavar="TOKENS", help="longest response that generation allowed"
        )
        parser.add_argument("--step", type=STEP, metavar="N", help="the step of a file without a step in its name")
        parser.add_argument(
            "--weights-root",
            metavar="NAME=FOLDER",
            help="announce checkpoints below FOLDER, which workers know as NAME",
        )
        add_sampling_options(parser)
        parser.add_argument("--unfinished", action="store_true", help="do not mark the run as finished")
        add_dump_options(parser)
        add_service_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Import. Raises ConfigurationError, RolloutsError, ServiceError."""
        attributes = sampling_attributes(arguments, length_cap=arguments.length_cap)
        chosen = chosen_format(arguments)
        if chosen is not None:
            if not arguments.follow:
                # Check them before a run is made for them.
                find_dumps(chosen.name, arguments.paths[0])
            with connect(arguments) as reader:
                client = self._client(reader, arguments)
                start = partial(self._start, client, attributes, arguments, trainer=chosen.framework)
                return import_dumps(client, reader, chosen, attributes, arguments, start)
        recording = find_recording(arguments.paths, step=arguments.step)
        root = _weights_root(arguments.weights_root)
        with connect(arguments) as reader:
            client = self._client(reader, arguments)
            with closing_import(client, reader, unfinished=arguments.unfinished):
                self._log(client, recording, attributes, arguments, root)
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

    def _client(self, reader: Reader, arguments: argparse.Namespace) -> Client:
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
        self, client: Client, attributes: BatchAttributes, arguments: argparse.Namespace, *, trainer: str | None = None
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
        self,
        client: Client,
        recording: Recording,
        attributes: BatchAttributes,
        arguments: argparse.Namespace,
        root: tuple[str, Path] | None,
    ) -> None:
        # Before a run is made: files that cannot be read must not leave an empty one, which would be the newest.
        scalars = [each for path in recording.scalars for each in read_scalars(path)]
        noted = functools.cache(print)
        for skipped in recording.unread:
            print(f"not read: {skipped.name}, whose step is unknown; use --step, or write its step into the name")
        first = read_shard(recording.shards[0], attributes, note=noted)
        paths = [_below(root[1], folder) for _, folder in recording.checkpoints] if root is not None else []
        if scalars:
            read, unread = recognised(name for _, values in scalars for name in values)
            print("\n".join(names_read("metrics.jsonl", read, unread)))
        self._start(client, attributes, arguments)
        for step, values in scalars:
            client.log_scalars(step, values)
        if root is not None:
            for (step, folder), path in zip(recording.checkpoints, paths, strict=True):
                client.log_checkpoint(step, root=root[0], path=path, local_folder=folder)
        elif recording.checkpoints:
            print(f"not announced: {plural(len(recording.checkpoints), 'checkpoint')}; use --weights-root NAME=FOLDER")
        progress = Progress("reading rollouts", len(recording.shards))
        for index, file in enumerate(recording.shards):
            batch = read_shard(file, attributes, note=noted) if index else first
            client.log_rollouts(file.step, batch, shard=file.shard, shards=file.shards, copy=False)
            progress.show(index + 1)


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


command = ImportCommand()
