"""`foreshock selfcheck`: check the meaning of the log-probs in files. Needs no service.

Values that the service would reject (probabilities, values above 0) are reported as findings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from pathlib import Path

from foreshock.commands.progress import Progress
from foreshock.commands.recording import ShardFile, find_recording, read_shard
from foreshock.commands.selfcheck_text import CheckedStep, render
from foreshock.commands.text import Paint
from foreshock.errors import ConfigurationError, RolloutsError
from foreshock.lint import LintEvidence, collect_evidence, run_checks
from foreshock.rollouts.attributes import LOGPROBS_MODES, TRAINER_POLICIES, BatchAttributes

__all__ = ["command"]

_ATTRIBUTES = ("temperature", "top_p", "top_k", "min_p", "logprobs_mode", "trainer_policy")
_CLEAN, _WARNED, _UNREADABLE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class _Unreadable:
    file: str
    error: str


class SelfcheckCommand:
    """Reads files, lints each step and all steps together, prints the findings."""

    help = "check the meaning of logged log-probs: shifted, rounded, truncated, duplicated, … (needs no service)"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.epilog = "Exit status: 0 clean, 1 warnings, 2 a file could not be read."
        parser.add_argument("paths", nargs="+", type=Path, metavar="FILE", help="files of rollouts, or a run's folder")
        parser.add_argument(
            "--step", type=int, default=0, metavar="N", help="the step of files without a step in their name"
        )
        parser.add_argument("--json", action="store_true", help="print JSON instead of text")
        sampling = parser.add_argument_group("sampling of all rollouts (for JSON lines, which do not contain it)")
        for name in ("temperature", "top-p", "min-p"):
            sampling.add_argument(f"--{name}", type=float)
        sampling.add_argument("--top-k", type=int)
        sampling.add_argument("--logprobs-mode", choices=LOGPROBS_MODES)
        sampling.add_argument("--trainer-policy", choices=TRAINER_POLICIES)

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the findings. Exit status 0 without findings, 1 with findings, 2 if a file could not be read."""
        try:
            files = find_recording(arguments.paths, step=arguments.step).shards
            attributes = BatchAttributes(**{name: getattr(arguments, name) for name in _ATTRIBUTES})
        except (ConfigurationError, OSError) as error:
            print(f"foreshock: error: {error}", file=sys.stderr)
            return _UNREADABLE
        steps: list[CheckedStep] = []
        unreadable: list[_Unreadable] = []
        for found in _checked(files, attributes):
            if isinstance(found, CheckedStep):
                steps.append(found)
            else:
                unreadable.append(found)
        together = _together(steps)
        if arguments.json:
            print(json.dumps(_to_json(steps, together, unreadable), indent=2, ensure_ascii=False, allow_nan=False))
        else:
            print("\n".join(render(steps, together, Paint())))
        for each in unreadable:
            print(f"foreshock: cannot read {each.file}: {each.error}", file=sys.stderr)
        if unreadable:
            return _UNREADABLE
        clean = all(step.report.is_clean for step in steps) and (together is None or together.report.is_clean)
        return _CLEAN if clean else _WARNED


def _checked(files: Iterable[ShardFile], attributes: BatchAttributes) -> Iterator[CheckedStep | _Unreadable]:
    """Yield the lint of each step (all its files together), and each file that cannot be read."""
    files = list(files)
    progress = Progress("checking", len(files))
    done = 0
    for step, in_step in groupby(files, key=lambda file: file.step):
        parts, names = [], []
        for file in in_step:
            try:
                parts.append(collect_evidence(read_shard(file, attributes, check_values=False)))
                names.append(file.path.name)
            except RolloutsError as error:
                yield _Unreadable(str(file.path), str(error))
            done += 1
            if len(files) > 1:
                progress.show(done)
        if parts:
            evidence = reduce(LintEvidence.merge, parts)
            yield CheckedStep(step, tuple(names), evidence, run_checks(evidence))


def _together(steps: list[CheckedStep]) -> CheckedStep | None:
    """Lint all steps together, because weak signals add up; None for a single step."""
    if len(steps) < 2:
        return None
    evidence = reduce(LintEvidence.merge, (step.evidence.without_rollout_hashes() for step in steps))
    return CheckedStep(-1, (), evidence, run_checks(evidence))


def _to_json(
    steps: list[CheckedStep], together: CheckedStep | None, unreadable: list[_Unreadable]
) -> dict[str, object]:
    return {
        "steps": [{"step": step.step, "files": list(step.files), **step.report.to_dict()} for step in steps],
        "together": None if together is None else together.report.to_dict(),
        "unreadable": [{"file": each.file, "error": each.error} for each in unreadable],
    }


command = SelfcheckCommand()
