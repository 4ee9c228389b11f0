"""`foreshock selfcheck`: check the meaning of the log-probs in files, and measure their mismatch. Needs no service.

Values that the service would reject (probabilities, values above 0) are reported as findings.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from itertools import groupby
from pathlib import Path

from foreshock.api.steps import LintWarningRecord
from foreshock.commands import import_dumps
from foreshock.commands.command import Command, add_fail_on, exit_status
from foreshock.commands.option_types import STEP
from foreshock.commands.text import STYLES, Paint, Progress, count, number, wrap
from foreshock.diagnosis.wording import plural
from foreshock.errors import ConfigurationError, RolloutsError
from foreshock.healthy_ranges import Verdict, required_range, verdict_of
from foreshock.importers import Dump, find_dumps
from foreshock.importers.recordings import find_recording, read_recorded
from foreshock.json_values import finite_or_none
from foreshock.lint import LintEvidence, LintReport, collect_evidence, run_checks
from foreshock.lint.checks.pairs import Pairs
from foreshock.rollouts.batch import RolloutBatch
from foreshock.severity import severity_rank

_INDENT = " " * 8


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """A linted step: its files, evidence and report."""

    step: int
    files: tuple[str, ...]
    evidence: LintEvidence
    report: LintReport


def mismatch_of(steps: Sequence[CheckedStep]) -> tuple[float, int, Verdict]:
    """Return the mean k3 of trainer/rollout over the tokens of all steps in nats, their number, and the verdict.

    NaN if no token has two log-probs. The verdict is that of a dense model: files do not have the kind of the model.
    """
    pairs = [step.evidence[Pairs] for step in steps]
    tokens = sum(each.tokens for each in pairs)
    k3 = sum(each.by_group.mean_and_t("k3")[0] * each.tokens for each in pairs if each.tokens)
    mean = k3 / tokens if tokens else math.nan
    return mean, tokens, verdict_of("k3_kl", mean, None)


def render(steps: Sequence[CheckedStep], together: CheckedStep | None, paint: Paint) -> list[str]:
    """Return the lines of text; `together` adds the warnings that no single step has."""
    if not steps:
        return ["No log-probs could be read."]
    lines: list[str] = []
    found = _by_name(steps)
    for name in sorted(found, key=lambda each: (severity_rank(found[each][0][1].severity), found[each][0][0].step)):
        lines += [*_warning(found[name][0][1], _at(found[name], steps), paint), ""]
    if together is not None:
        for warning in together.report.warnings:
            if warning.name not in found:
                lines += [*_warning(warning, f"in all {len(steps)} steps together", paint), ""]
    return [*lines, *_summary(steps, together, paint)]


def _by_name(steps: Sequence[CheckedStep]) -> dict[str, list[tuple[CheckedStep, LintWarningRecord]]]:
    found: dict[str, list[tuple[CheckedStep, LintWarningRecord]]] = {}
    for step in steps:
        for warning in step.report.warnings:
            found.setdefault(warning.name, []).append((step, warning))
    return found


def _at(found: Sequence[tuple[CheckedStep, LintWarningRecord]], steps: Sequence[CheckedStep]) -> str:
    if len(steps) == 1:
        return ""
    first = found[0][0].step
    if len(found) == 1:
        return f"at step {first}"
    at = f"at {count(len(found))} of {count(len(steps))} steps, {first} to {found[-1][0].step}"
    return f"{at}; this is step {first}"


def _warning(warning: LintWarningRecord, at: str, paint: Paint) -> Iterator[str]:
    head = f"{warning.severity:<8}  {warning.name}: {warning.title}" + (f" ({at})" if at else "")
    first, *rest = wrap(head, _INDENT, first=" ")
    yield paint(first, STYLES[warning.severity])
    yield from rest
    yield from wrap(warning.seen, _INDENT)
    if warning.where:
        yield from wrap(f"Where: {'; '.join(map(str, warning.where))}", _INDENT)
    yield from wrap(f"To the measures: {warning.effect}", _INDENT)
    yield from wrap(f"What to do: {warning.remedy}", _INDENT)


def _summary(steps: Sequence[CheckedStep], together: CheckedStep | None, paint: Paint) -> Iterator[str]:
    """Yield the totals and the checks that were not possible; over all steps together if there are several."""
    of_all = (together or steps[0]).report
    clean = sum(step.report.is_clean for step in steps)
    left_out = _not_checked(steps, together)
    checks = len(of_all.checks)
    made = checks - sum(len(names) for names in left_out.values())
    result = "clean" if clean == len(steps) else f"{count(clean)} of them clean"
    if len(steps) == 1:
        result = "clean" if clean else plural(len(of_all.warnings), "warning")
    totals = (plural(len(steps), "step"), plural(of_all.rollouts, "rollout"), plural(of_all.tokens, "token"))
    of_checks = f"{made} checks" if made == checks else f"{made} of {checks} checks"
    yield paint(f"{', '.join(totals)}, {of_checks}: {result}.", "bold")
    k3, tokens, verdict = mismatch_of(steps)
    if tokens:
        text = (
            f"The mismatch (k3) is {number(k3)} nats per token over {plural(tokens, 'token')}: {verdict}; "
            f"{required_range('k3_kl').healthy} is healthy for a dense model."
        )
        yield from (paint(line, STYLES[verdict]) for line in wrap(text, _INDENT, first=" "))
    for why, names in left_out.items():
        yield from wrap(f"not checked: {', '.join(names)}: {why}", _INDENT, first=" ")


def _not_checked(steps: Sequence[CheckedStep], together: CheckedStep | None) -> dict[str, list[str]]:
    """Return the checks that neither a step nor all steps together allowed, by reason."""
    reports = [step.report for step in steps] + ([together.report] if together is not None else [])
    made = {check.name for report in reports for check in report.checks if check.state != "not checked"}
    found: dict[str, list[str]] = {}
    for check in (together or steps[0]).report.not_checked:
        if check.name not in made:
            found.setdefault(check.why, []).append(check.name)
    return found


_UNREADABLE = 2


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status: 1 a critical finding or k3 (see --fail-on), 2 a file could not be read, else 0."
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE", help="rollouts, a run's folder, or dumps")
    parser.add_argument(
        "--step", type=STEP, default=0, metavar="N", help="the step of files without a step in their name"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_fail_on(parser)
    import_dumps.add_format_options(parser)
    import_dumps.add_sampling_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings. Exit status 1 if something is critical, 2 if a file could not be read, else 0."""
    try:
        parts = _parts(arguments)
    except (ConfigurationError, OSError) as error:
        print(f"foreshock: error: {error}", file=sys.stderr)
        return _UNREADABLE
    unreadable: list[dict[str, str]] = []
    steps = list(_checked(parts, unreadable))
    together = _together(steps)
    if arguments.json:
        print(json.dumps(_to_json(steps, together, unreadable), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print("\n".join(render(steps, together, Paint())))
    for each in unreadable:
        print(f"foreshock: cannot read {each['file']}: {each['error']}", file=sys.stderr)
    if unreadable:
        return _UNREADABLE
    reports = [step.report for step in (*steps, *([] if together is None else [together]))]
    severities = [warning.severity for report in reports for warning in report.warnings]
    return exit_status(arguments, [*severities, mismatch_of(steps)[2]])


# Step, file, and the function that reads its batches or raises RolloutsError.
_Part = tuple[int, Path, Callable[[], Sequence[RolloutBatch]]]


def _parts(arguments: argparse.Namespace) -> list[_Part]:
    """Return the parts of the files. Raises ConfigurationError and OSError."""
    options = import_dumps.read_options(arguments, import_dumps.sampling_attributes(arguments))
    kind, note = import_dumps.chosen_format(arguments), cache(partial(print, file=sys.stderr))
    if kind is None:
        options, found = replace(options, check_values=False), find_recording(arguments.paths, step=arguments.step)
        dumps = [Dump(each.step, (file,)) for each in found.dumps for file in each.files]
    else:
        dumps = find_dumps(kind.name, arguments.paths[0])

    def read(dump: Dump) -> Sequence[RolloutBatch]:
        found = (read_recorded if kind is None else kind.read)(dump, options)
        for each in (*found.notes, *(sentence for _, sentence in found.left_out if kind is None)):
            note(f"note: {each}")
        return found.batches

    return [(dump.step, dump.files[0], partial(read, dump)) for dump in dumps]


def _checked(parts: Sequence[_Part], unreadable: list[dict[str, str]]) -> Iterator[CheckedStep]:
    """Yield the lint of each step (all its files together); add each file that cannot be read to `unreadable`."""
    progress = Progress("checking", len(parts))
    done = 0
    for step, in_step in groupby(parts, key=lambda part: part[0]):
        found, names = [], []
        for _, path, read in in_step:
            try:
                found += [collect_evidence(batch) for batch in read()]
                names.append(path.name)
            except RolloutsError as error:
                unreadable.append({"file": str(path), "error": str(error)})
            done += 1
            if len(parts) > 1:
                progress.show(done)
        if found:
            evidence = reduce(LintEvidence.merge, found)
            yield CheckedStep(step, tuple(names), evidence, run_checks(evidence))


def _together(steps: list[CheckedStep]) -> CheckedStep | None:
    """Lint all steps together, because weak signals add up; None for a single step."""
    if len(steps) < 2:
        return None
    evidence = reduce(LintEvidence.merge, (step.evidence.across_steps() for step in steps))
    return CheckedStep(-1, (), evidence, run_checks(evidence))


def _to_json(
    steps: list[CheckedStep], together: CheckedStep | None, unreadable: list[dict[str, str]]
) -> dict[str, object]:
    k3, tokens, verdict = mismatch_of(steps)
    return {
        "k3_kl": {"mean": finite_or_none(k3), "tokens": tokens, "verdict": verdict},
        "steps": [{"step": step.step, "files": list(step.files), **step.report.to_dict()} for step in steps],
        "together": None if together is None else together.report.to_dict(),
        "unreadable": unreadable,
    }


command = Command(
    "check the meaning of logged log-probs: shifted, rounded, truncated, duplicated, … (needs no service)",
    configure,
    run,
)
