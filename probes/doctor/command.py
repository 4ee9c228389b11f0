"""`foreshock doctor`: explain the log-probs of logged rollouts by replaying them with folders of weights."""

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

from foreshock.commands.import_rollouts import find_recording, read_shard
from foreshock.errors import ConfigurationError
from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock.rollouts.attributes import LOGPROBS_MODES
from foreshock.rollouts.sampling import select_rollouts

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class DoctorCommand:
    """Explain logged log-probs by experiments. Needs no service."""

    help = "find the change of weights, sampling or forward pass that reproduces logged log-probs"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options to `parser`."""
        parser.add_argument("files", nargs="+", metavar="FILE", help="files of rollouts, as `foreshock import` takes")
        parser.add_argument(
            "--engine-weights",
            nargs="+",
            required=True,
            metavar="DIR",
            help="folders of safetensors: the weights that the engine should hold, then others to try",
        )
        parser.add_argument(
            "--trainer-weights",
            nargs="+",
            metavar="DIR",
            help="those of the trainer, then others to try (default: those of the engine)",
        )
        parser.add_argument("--budget", default="10m", help="time for experiments: 90s, 10m, 1h (default: 10m)")
        parser.add_argument(
            "--rollouts", type=int, default=256, metavar="N", help="an even sample of N rollouts (default: 256)"
        )
        parser.add_argument("--temperature", type=float, help="declare the sampling temperature, if the file does not")
        parser.add_argument("--logprobs-mode", choices=LOGPROBS_MODES, help="declare what the engine logs")
        parser.add_argument("--threads", type=int, default=0, metavar="N", help="threads of torch (default: its own)")
        parser.add_argument("--json", action="store_true", help="print the report as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the experiments, print the report and return 0, or 1 if they could not be made."""
        from foreshock.doctor import Budget, CannotTryError, examine
        from foreshock_probes.doctor.experimenter import TorchExperimenter

        batch = _read(arguments)
        engine = [Path(each) for each in arguments.engine_weights]
        trainer = [Path(each) for each in arguments.trainer_weights or engine]

        def log(line: str) -> None:
            if sys.stderr.isatty():
                print(f"  {line}", file=sys.stderr)

        try:
            budget = Budget(seconds=seconds(arguments.budget))
            others = [*engine[1:], *trainer[1:]]
            experimenter = TorchExperimenter(batch, engine[0], trainer[0], others, threads=arguments.threads)
            report = examine(batch, experimenter, budget, log)
        except CannotTryError as error:
            print(f"foreshock doctor: cannot try anything: {error}", file=sys.stderr)
            return 1
        if arguments.json:
            print(json.dumps(report.to_dict(), ensure_ascii=False))
        else:
            print("\n".join(report.lines()))
        return 0


def seconds(text: str) -> float:
    """Return a time such as 90s, 10m or 1h in seconds. Raises ConfigurationError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None:
        raise ConfigurationError(f"--budget must be a time such as 90s, 10m or 1h, got {text!r}")
    return float(found[1]) * _SECONDS[found[2] or "s"]


def _read(arguments: argparse.Namespace) -> RolloutBatch:
    """Return an even sample of the rollouts of the files."""
    declared = {"temperature": arguments.temperature, "logprobs_mode": arguments.logprobs_mode}
    attributes = BatchAttributes(**{name: value for name, value in declared.items() if value is not None})
    files = find_recording((Path(each) for each in arguments.files), step=0).shards
    batch = _joined([(file.path.name, read_shard(file, attributes)) for file in files])
    if declared_now := {name: value for name, value in declared.items() if value is not None}:
        batch = replace(batch, attributes=replace(batch.attributes, **declared_now))
    chosen = select_rollouts(batch.sample_ids, batch.response_lengths, arguments.rollouts)
    return batch.select([row for row in chosen.tolist() if batch.response_lengths[row] > 0])


def _joined(parts: list[tuple[str, RolloutBatch]]) -> RolloutBatch:
    """Return the batches as one, with sample and group ids that name the file. Raises ConfigurationError."""
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
