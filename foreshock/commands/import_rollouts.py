"""`foreshock import`: log a recorded run, or the dumps of a training framework, through the client, like a trainer.

Importing again changes nothing: the same files give the same bytes in the same attempt.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from foreshock.client.client import Client
from foreshock.commands import import_dumps
from foreshock.commands.command import Command, add_service_options, connect
from foreshock.commands.option_types import COUNT, POSITIVE, STEP, filled
from foreshock.diagnosis.quantities import recognised
from foreshock.diagnosis.wording import names_read, plural
from foreshock.errors import ConfigurationError, did_you_mean
from foreshock.importers import DumpFormat, find_dumps
from foreshock.importers.recordings import Recording, find_recording, read_recorded, read_scalars
from foreshock.model_kind import MODEL_KINDS
from foreshock.page_addresses import DEFAULT_PROJECT
from foreshock.rollouts.rollout_files import READABLE

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
    kind, options = import_dumps.chosen_format(arguments), import_dumps.read_options(arguments, attributes)
    log_beside = None
    if kind is None:
        recording = find_recording(arguments.paths, step=arguments.step, options=options)
        kind = DumpFormat("recorded", "", "", lambda _: [*recording.dumps], read_recorded)
        log_beside = _beside(recording, arguments)
    elif not arguments.follow:
        # Check them before a run is made for them.
        find_dumps(kind.name, arguments.paths[0])
    with connect(arguments) as reader:
        # Without a service the import fails at once instead of spooling.
        reader.connection.request("GET", "/livez")
        client = Client(
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

        def start() -> None:
            description = {name: getattr(arguments, name) for name in _DESCRIBED}
            client.start_run(
                **{**description, "trainer": arguments.trainer or kind.framework or None},
                initial_learning_rate=arguments.initial_learning_rate,
                length_cap=arguments.length_cap,
                model_kind=arguments.model_kind,
                attributes=attributes,
            )
            if log_beside is not None:
                log_beside(client)

        return import_dumps.import_dumps(client, reader, kind, options, arguments, start)


def _beside(recording: Recording, arguments: argparse.Namespace) -> Callable[[Client], None]:
    """Return the function that logs what a recorded run has beside its rollouts. Raises ConfigurationError.

    It is read here: files that cannot be read must not leave an empty run, which would be the newest.
    """
    scalars = [each for path in recording.scalars for each in read_scalars(path)]
    root = _weights_root(arguments.weights_root)
    weights = [] if root is None else [(step, each, _below(root[1], each)) for step, each in recording.checkpoints]

    def log(client: Client) -> None:
        for skipped in recording.unread:
            print(f"not read: {skipped.name}, whose step is unknown; use --step, or write its step into the name")
        if scalars:
            names = recognised(name for _, values in scalars for name in values)
            print("\n".join(names_read("metrics.jsonl", *names)))
        for step, values in scalars:
            client.log_scalars(step, values)
        for step, folder, path in weights:
            client.log_checkpoint(step, root=root[0] if root else "", path=path, local_folder=folder)
        if recording.checkpoints and root is None:
            print(f"not announced: {plural(len(recording.checkpoints), 'checkpoint')}; use --weights-root NAME=FOLDER")

    return log


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
