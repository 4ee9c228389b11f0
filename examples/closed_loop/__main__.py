"""Make the runs of the closed loop that are not there yet; end it at any time and call it again.

    nice -n 19 make closed-loop                         # all of them
    nice -n 19 make closed-loop RUNS=10                 # the next ten
    python -m examples.closed_loop --only lag8-lr0.0001-advice-seed1003 --results FOLDER    # one again

The results are one Parquet file, `examples/closed_loop/results/runs.parquet`. One process makes all runs, with one
thread: it starts Python and the engines once (12 CPU seconds). A run takes 20 to 60 CPU seconds: 55 % are sampling,
mostly vLLM's Python code between its decoding steps, 30 % training, 8 % giving the engine its weights, 3 % measures.
Detectors and decisions are below 3 %, and the garbage collector makes no difference.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from examples.closed_loop.plan import SEEDS, Plan, plans
from examples.collapses.__main__ import describe_process, result_of, use_one_thread
from examples.collapses.results import (
    Result,
    finished_runs,
    pack_results,
    read_results,
    result_file,
    write_result,
)
from foreshock.diagnosis.detectors import WarningConfiguration
from foreshock.diagnosis.lags import LAG_KEY
from foreshock.diagnosis.quantities import (
    LEARNING_RATE_KEY,
    LENGTH_KEY,
    LONGEST_KEY,
    REWARD_KEY,
    TRUNCATED_KEY,
    UPDATE_KEY,
)

if TYPE_CHECKING:
    from examples.collapses.run import Laboratory

RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str] | None = None) -> int:
    """Make the runs that are asked for. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help="end after so many runs (default: all)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"seeds of each arm, even (default: {SEEDS})")
    parser.add_argument("--only", metavar="RUN", help="make this run, and what it depends on")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    wanted = plans(options.seeds)
    if options.only:
        named = [plan for plan in wanted if plan.name == options.only]
        if not named:
            print(f"no run is called {options.only!r}; runs are called as {wanted[0].name}", file=sys.stderr)
            return 2
        wanted = [*needed_by(named[0]), *named]
    finished = finished_runs(options.results)
    missing = [plan for plan in wanted if plan.name not in finished][: options.runs]
    if not missing:
        print("all runs are done")
        return 0
    options.results.mkdir(parents=True, exist_ok=True)
    with (options.results / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process makes runs in {options.results}", file=sys.stderr)
            return 1
        try:
            _make(missing, options.results)
        finally:
            pack_results(options.results)
    return 0


def needed_by(plan: Plan) -> list[Plan]:
    """Return the runs whose results a run is made from."""
    if plan.arm == "matched":
        return [plan.of("advice")]
    return [plan.of("advice", plan.partner)] if plan.arm == "sham" else []


def _make(missing: list[Plan], folder: Path) -> None:
    use_one_thread()
    from examples.collapses.run import Laboratory

    laboratory = Laboratory()
    made_by = describe_process()
    for plan in missing:
        result = make_run(laboratory, plan, folder, made_by)
        write_result(result_file(folder, plan.name), result)
        print(f"{plan.name}: {len(result.steps)} steps, {result.ended}, {result.cpu_seconds:.0f} CPU s", flush=True)


def make_run(laboratory: Laboratory, plan: Plan, folder: Path, made_by: dict[str, object]) -> Result:
    """Return the result of one run; the runs that it needs are read from ``folder``."""
    from examples.closed_loop.arms import control_of

    control = control_of(plan, lambda other: read_results(folder, only=other.name)[other.name])
    found = laboratory.run(plan.settings, control=control)
    return only_kept(result_of(found, plan.to_json(), made_by))


def only_kept(result: Result) -> Result:
    """Return a result with the columns that the detectors read: a fifth of what a step measures."""
    rules = WarningConfiguration.for_model("dense").rules
    kept = {REWARD_KEY, LENGTH_KEY, LONGEST_KEY, TRUNCATED_KEY, LEARNING_RATE_KEY, LAG_KEY, UPDATE_KEY}
    kept |= {key for rule in rules for key in rule.keys}
    return replace(result, columns={name: values for name, values in result.columns.items() if name in kept})


if __name__ == "__main__":
    sys.exit(main())
