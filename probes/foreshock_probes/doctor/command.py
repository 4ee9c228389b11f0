"""`foreshock doctor`: explain logged log-probs by replays. A worker replays a run's step; files are replayed here."""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from foreshock.api.doctor import DoctorStepRecord
from foreshock.api.records import to_json
from foreshock.api.runs import RunRecord
from foreshock.client.reader import Reader
from foreshock.commands.command import add_project_option, add_service_options, connect
from foreshock.commands.option_types import COUNT, STEP, real, whole
from foreshock.commands.probe import probe_lines, wait_for_probe
from foreshock.commands.queries import find_run
from foreshock.doctor import Budget, CannotTryError, examine, lines_of_differences, report_lines
from foreshock.doctor.findings import record_lines
from foreshock.errors import ConfigurationError, did_you_mean
from foreshock.importers.recordings import find_recording
from foreshock.probe_kinds import DOCTOR, DOCTOR_SECONDS
from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock.rollouts.attributes import LOGPROBS_MODES
from foreshock.rollouts.rollout_files import read_rollout_file
from foreshock.rollouts.sampling import select_rollouts
from foreshock.scorers import available_scorers

_LONGEST_START_SECONDS = 600.0
"""Longest time until a worker takes the job and has loaded the weights."""
_MOST_THREADS = 4096
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class DoctorCommand:
    """Explain logged log-probs by experiments: those of files, here; those of a run's step, by a worker."""

    help = "find the change of weights, sampling or forward pass that reproduces logged log-probs"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options to `parser`."""
        parser.add_argument(
            "what",
            nargs="+",
            metavar="RUN|FILE",
            help="a run of the service; with --engine-weights: files of rollouts, as `foreshock import` takes",
        )
        parser.add_argument("--step", type=STEP, metavar="N", help="step of the run (default: the newest with weights)")
        parser.add_argument(
            "--engine-weights",
            nargs="+",
            metavar="DIR",
            help="folders of safetensors: the weights that the engine should hold, then others to try",
        )
        parser.add_argument(
            "--trainer-weights",
            nargs="+",
            metavar="DIR",
            help="those of the trainer, then others to try (default: those of the engine)",
        )
        parser.add_argument(
            "--engine",
            nargs="+",
            default=[],
            metavar="SCORER[:OPTION=VALUE,…]",
            help="ask real engines: without options as ordinary numerics, with them (kv_cache_dtype=fp8) as a variant",
        )
        parser.add_argument(
            "--against",
            metavar="RUN2",
            help="another run of the project: its weights and configuration are tried too, it is examined at the same "
            "step or the last one before with weights, and what differs is printed",
        )
        parser.add_argument(
            "--budget",
            type=seconds,
            default=DOCTOR_SECONDS,
            help=f"time for experiments: 90s, 10m, 1h (default: {DOCTOR_SECONDS / 60:.0f}m)",
        )
        parser.add_argument(
            "--rollouts",
            type=COUNT,
            default=DOCTOR.rollouts,
            metavar="N",
            help=f"an even sample of N rollouts (default: {DOCTOR.rollouts})",
        )
        parser.add_argument("--temperature", type=float, help="declare the sampling temperature, if the file does not")
        parser.add_argument("--logprobs-mode", choices=LOGPROBS_MODES, help="declare what the engine logs")
        parser.add_argument(
            "--threads",
            type=whole(0, _MOST_THREADS),
            default=0,
            metavar="N",
            help="threads of torch (default: its own)",
        )
        parser.add_argument("--json", action="store_true", help="print the report as JSON")
        add_project_option(parser)
        add_service_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the experiments, print the report and return 0, or 1 if they could not be run."""
        if arguments.engine_weights is None:
            return _examine_run(arguments)
        return _examine_files(arguments)


def _examine_run(arguments: argparse.Namespace) -> int:
    """Request an examination of a step, and of one of the run to compare with; print the reports."""
    if len(arguments.what) > 1 or Path(arguments.what[0]).is_file():
        raise ConfigurationError("give the weights of the files with --engine-weights, or name one run")
    with connect(arguments) as reader:
        run = find_run(reader, arguments.what[0])
        step = _newest_step(reader, run) if arguments.step is None else arguments.step
        asked: dict[str, tuple[str, int, str | None]] = {run.title: (run.id, step, None)}
        if arguments.against is not None:
            other = find_run(reader, arguments.against)
            last = _newest_step(reader, other, step)
            mine, theirs = (run.key, other.key) if run.title == other.title else (run.title, other.title)
            asked = {f"{mine}, step {step}": (run.id, step, other.id), f"{theirs}, step {last}": (other.id, last, None)}
        records = _examined(reader, asked, arguments)
    if len(records) < len(asked):
        return 1
    reports = {title: record.report for title, record in records.items()}
    if arguments.json:
        values = {title: to_json(report) for title, report in reports.items()}
        print(json.dumps(values if len(values) > 1 else values[run.title], ensure_ascii=False))
        return 0
    for title, record in records.items():
        print("\n".join([*([f"{title}:"] if len(records) > 1 else []), *record_lines(record), ""]))
    if len(reports) > 1:
        print("\n".join(lines_of_differences(reports)))
    return 0


def _examined(
    reader: Reader, asked: Mapping[str, tuple[str, int, str | None]], arguments: argparse.Namespace
) -> dict[str, DoctorStepRecord]:
    """Request examinations, wait for them and return the reports up to the first failed one."""
    probes = {
        title: reader.examine_step(
            run, step, budget_seconds=arguments.budget, max_rollouts=arguments.rollouts, against=against
        )
        for title, (run, step, against) in asked.items()
    }
    records: dict[str, DoctorStepRecord] = {}
    for title, probe in probes.items():
        done = wait_for_probe(reader, to_json(probe), arguments.budget + _LONGEST_START_SECONDS)
        if done["state"] != "done":
            print("\n".join(probe_lines(done)), file=sys.stderr)
            break
        run, step, _ = asked[title]
        records[title] = reader.doctor(run, step, attempt=done["attempt"])
    return records


def _newest_step(reader: Reader, run: RunRecord, last: int | None = None) -> int:
    """Return the newest step, up to `last`, with announced weights. Raises ConfigurationError if there is none."""
    steps = [each.step for each in reader.checkpoints(run.id)]
    steps = [step for step in steps if last is None or step <= last]
    if not steps:
        raise ConfigurationError(
            f"the run {run.title} has announced no weights{'' if last is None else f' up to step {last}'}, which "
            "replays need: announce them with log_checkpoint(step, …)"
        )
    return max(steps)


def _examine_files(arguments: argparse.Namespace) -> int:
    from foreshock_probes.doctor.engines import EngineReplays
    from foreshock_probes.doctor.experimenter import TorchExperimenter

    for each in arguments.engine:
        check_scorer("--engine", each)
    batch = _read(arguments)
    engine = [Path(each) for each in arguments.engine_weights]
    trainer = [Path(each) for each in arguments.trainer_weights or engine]

    budget = Budget(seconds=arguments.budget)

    def log(line: str) -> None:
        print(f"{budget.spent:5.0f} of at most {budget.seconds:.0f} s  {line}", file=sys.stderr, flush=True)

    try:
        others = [*engine[1:], *trainer[1:]]
        with tempfile.TemporaryDirectory() as files:
            engines = EngineReplays(batch, engine[0], Path(files))
            experimenter = TorchExperimenter.of_folders(
                batch, engine[0], trainer[0], others, arguments.threads, engines, arguments.engine
            )
            report = examine(batch, experimenter, budget, log)
    except CannotTryError as error:
        print(f"foreshock doctor: cannot try anything: {error}", file=sys.stderr)
        return 1
    print(json.dumps(to_json(report), ensure_ascii=False) if arguments.json else "\n".join(report_lines(report)))
    return 0


def check_scorer(option: str, text: str) -> None:
    """Raise ConfigurationError for an unknown scorer or an option without a value: the answer would be another."""
    scorer, _, options = text.partition(":")
    known = available_scorers()
    if scorer not in known:
        raise ConfigurationError(
            f"{option}: unknown scorer {scorer!r}{did_you_mean(scorer, known)}; scorers: {', '.join(known)}"
        )
    wrong = next((each for each in options.split(",") if each and not re.fullmatch("[^=]+=.+", each)), None)
    if wrong is not None:
        raise ConfigurationError(f"{option}: options must be OPTION=VALUE, got {wrong!r}")


def seconds(text: str) -> float:
    """Return a time such as 90s, 10m or 1h in seconds. Raises argparse.ArgumentTypeError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a time such as 90s, 10m or 1h, got {text!r}")
    return real(most=86_400, above=True)(str(float(found[1]) * _SECONDS[found[2] or "s"]))


def _read(arguments: argparse.Namespace) -> RolloutBatch:
    """Return an even sample of the rollouts of the files."""
    declared = {"temperature": arguments.temperature, "logprobs_mode": arguments.logprobs_mode}
    declared = {name: value for name, value in declared.items() if value is not None}
    attributes = BatchAttributes(**declared)
    note = partial(print, file=sys.stderr)
    batch = _joined([
        (file.name, read_rollout_file(file, step=dump.step, attributes=attributes, note=note))
        for dump in find_recording((Path(each) for each in arguments.what), step=0).dumps
        for file in dump.files
    ])  # fmt: skip
    batch = replace(batch, attributes=replace(batch.attributes, **declared))
    chosen = select_rollouts(batch.sample_ids, batch.response_lengths, arguments.rollouts)
    return batch.select([row for row in chosen.tolist() if batch.response_lengths[row] > 0])


def _joined(parts: list[tuple[str, RolloutBatch]]) -> RolloutBatch:
    """Concatenate the batches; sample and group ids then name the file. Raises ConfigurationError."""
    first = parts[0][1].attributes
    named = []
    for name, part in parts:
        for field in ("temperature", "top_p", "top_k", "min_p", "logprobs_mode"):
            if getattr(part.attributes, field) != getattr(first, field):
                raise ConfigurationError(f"{name} declares another {field} than {parts[0][0]}: examine them apart")
        groups = None if part.group_ids is None else [each and f"{name}:{each}" for each in part.group_ids]
        ids = [f"{name}:{each}" for each in part.sample_ids] if len(parts) > 1 else part.sample_ids
        named.append(replace(part, attributes=first, sample_ids=ids, group_ids=groups))
    return RolloutBatch.concat(named)


doctor = DoctorCommand()
