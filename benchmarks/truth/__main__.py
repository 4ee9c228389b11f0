"""Does the product say only what is true? Cases whose truth is known, through the real service. `make bench-truth`

Each row is a case: its true cause, the sentence that the product shows, and whether that is true. A row is false if a
cause is named that is not the true one, if the true one is not named although the data suffices, or if a faulty run is
called healthy. Cases are in the files `*_cases.py` beside this one.

    python -m benchmarks.truth                       all cases
    python -m benchmarks.truth lint                  one topic: those of lint_cases.py
    python -m benchmarks.truth --case "pad id"       cases whose name matches this regular expression

Bar: at least 40 cases, none of them false. Exits with 1 otherwise, and if a case fails with an error.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import textwrap
import time
import traceback
from pathlib import Path

from benchmarks.bars import Line, report
from benchmarks.truth.bench import Bench, open_bench
from benchmarks.truth.case import Case, Verdict, judge

LEAST_CASES = 40
SUFFIX = "_cases"
SENTENCE_WIDTH = 100


def topics() -> dict[str, tuple[Case, ...]]:
    """Return the cases of each file `*_cases.py`, by topic."""
    names = sorted(path.stem for path in Path(__file__).parent.glob(f"*{SUFFIX}.py"))
    modules = {name: importlib.import_module(f"benchmarks.truth.{name}") for name in names}
    return {name.removesuffix(SUFFIX): tuple(module.CASES) for name, module in modules.items()}


def run_case(bench: Bench, case: Case) -> Verdict:
    """Return the verdict on a case; a case that raises is false."""
    try:
        return judge(case, case.run(bench))
    except Exception:
        traceback.print_exc()
        return Verdict(case, "error: see the traceback", false_cause=True, named=False)


def row(topic: str, verdict: Verdict, seconds: float) -> str:
    """Return the line of a case, and its sentence below it."""
    case = verdict.case
    expected = case.expected_cause or "no cause"
    expected += "" if case.sufficient or case.expected_cause is None else " (data insufficient)"
    state = "true" if verdict.true else "FALSE"
    if verdict.called_healthy:
        state += " (called healthy)"
    shown = textwrap.wrap(verdict.shown, SENTENCE_WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([f"{topic:<12}{case.name:<52} {expected:<36} {seconds:5.1f} s  {state}", *shown])


def main() -> int:
    """Run the chosen cases and print a table."""
    found = topics()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topic", nargs="*", help=f"only these of {', '.join(found)}")
    parser.add_argument("--case", metavar="PATTERN", default="", help="only cases whose name matches")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and exit")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.topic if name not in found]
    if unknown:
        parser.error(f"unknown topic {unknown[0]!r}; topics: {', '.join(found)}")
    chosen = [
        (topic, case)
        for topic, cases in found.items()
        if not arguments.topic or topic in arguments.topic
        for case in cases
        if re.search(arguments.case, case.name)
    ]
    if arguments.list:
        print("\n".join(f"{topic:<12}{case.name}" for topic, case in chosen))
        return 0
    verdicts = []
    began = time.monotonic()
    with open_bench() as bench:
        for topic, case in chosen:
            case_began = time.monotonic()
            verdicts.append(run_case(bench, case))
            print(row(topic, verdicts[-1], time.monotonic() - case_began), flush=True)
    with_cause = [verdict for verdict in verdicts if verdict.must_be_named]
    partial = bool(arguments.topic or arguments.case)
    return report(
        [
            Line("cases", "cases", len(verdicts), None if partial else LEAST_CASES, at_least=True),
            Line("false", "false ones", sum(not verdict.true for verdict in verdicts), 0),
            Line("false_causes", "… that name a false cause", sum(verdict.false_cause for verdict in verdicts)),
            Line("named", "causes that are named", sum(verdict.named for verdict in with_cause)),
            Line("of", "… of those that must be", len(with_cause)),
        ],
        seconds=time.monotonic() - began,
        partial=partial,
    )


if __name__ == "__main__":
    sys.exit(main())
