"""Write docs/collapses.md from the results: `python -m examples.collapses.analyse`; `--check` changes nothing.

All of the document is made from the Parquet files, and by today's rules, whose digest it names.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Final

import numpy as np

from examples.collapses import tables
from examples.collapses.grid import DOSES, LEARNING_RATES, SEEDS, SEEDS_PER_CYCLE, RunSettings, grid
from examples.collapses.labels import REWARD_FLOOR
from examples.collapses.leads import MOST_FALSE_ALARMS
from examples.collapses.results import RESULTS, Result, read_results
from examples.collapses.summary import FIRST_STEP, LAST_STEP, Summary, closed_steps, summarize
from examples.collapses.text import CLOSING, OPENING
from foreshock.backtest.replay import replay_run
from foreshock.backtest.scoring import ALL_WARNINGS, score, warnings_of
from foreshock.diagnosis.detectors import WarningConfiguration

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "collapses.md"

AIMED_HITS: Final = 0.9
AIMED_FALSE_ALARMS: Final = 1.0
"""What the rules are meant to reach: the share of collapses of mismatch warned of, and false alarms per 1,000."""

_NOT_FILLED: Final = ("#", "|", "-", "`", "<")


def document(results: dict[str, Result]) -> str:
    """Return the text of docs/collapses.md. `results` must not be empty."""
    runs = summarize(results)
    configuration = WarningConfiguration.for_model("dense")
    parts: dict[str, tables.Part] = {
        name: [
            (run, replay_run(run.name, steps, configuration, REWARD_FLOOR), steps)
            for run in runs
            if run.part == name
            for steps in (closed_steps(results[run.name]),)
        ]
        for name in ("tuning", "locked")
    }
    sections = [
        OPENING.format(progress=_progress(runs), command=_command(runs)),
        _how(runs, results),
        _responses(runs),
        _leads(parts["tuning"], parts["locked"]),
        f"<!-- rules: {configuration.digest()} -->\n{_rules(parts)}\n\n<!-- end of rules -->",
        CLOSING,
    ]
    blocks = "\n\n".join(section.strip() for section in sections).split("\n\n")
    return "\n\n".join(map(_filled, blocks)) + "\n"


def _filled(block: str) -> str:
    """Return a paragraph in lines of at most 120 characters; headings, tables, lists and code as they are."""
    return block if block.startswith(_NOT_FILLED) else textwrap.fill(block, 120, break_on_hyphens=False)


def _progress(runs: list[Summary]) -> str:
    planned = {each.name for each in grid()}
    done = sum(run.name in planned for run in runs)
    collapsed = sum(run.collapse is not None for run in runs)
    text = (
        f"**{done} of the {len(planned)} runs of the grid are done** ({len(DOSES)} doses × {len(LEARNING_RATES)} "
        f"learning rates × {SEEDS} seeds), {collapsed} of them collapsed."
    )
    if done == len(planned):
        return text
    cells = Counter((run.dose, run.learning_rate) for run in runs)
    counts = [cells[dose.name, rate] for dose in DOSES for rate in LEARNING_RATES]
    locked = sum(run.part == "locked" for run in runs)
    return (
        f"{text} The grid is not complete: a cell has {min(counts)} to {max(counts)} of {SEEDS} runs, and "
        f"{locked} runs are of the locked part. Every statement below is about the runs that are done."
    )


def _command(runs: list[Summary]) -> str:
    seconds = float(np.median([run.cpu_seconds / run.steps for run in runs]))
    return f"{seconds:.2f} CPU seconds in the median, {sum(run.cpu_seconds for run in runs) / 60:.0f} CPU minutes"


def _how(runs: list[Summary], results: dict[str, Result]) -> str:
    settings = RunSettings(DOSES[0], LEARNING_RATES[0], 0)
    made_by = [result.made_by for result in results.values()]
    engines = sorted({f"vLLM {each['engine']['engine_version']}" for each in made_by})
    trainers = sorted({f"torch {each['trainer']['engine_version']}" for each in made_by})
    machines = sorted({f"{each['engine']['device_name']} ({each['engine']['cpu_isa']})" for each in made_by})
    errors = [run.engine_error for run in runs if np.isfinite(run.engine_error)]
    error = f" The largest mean difference of a run is {max(errors):.3f} nats." if errors else ""
    return f"""
Made with {", ".join([*engines, *trainers])} on {", ".join(machines)}, one thread. {settings.prompts} prompts ×
{settings.responses} responses a step, sums of {settings.fewest_digits} to {settings.most_digits} digits, at most
{settings.max_response_tokens} tokens a response, {settings.steps} steps or until {settings.steps_after_collapse} steps
after a collapse is confirmed. Every {settings.fixed_every}th step is scored by torch in float32 too, with the engine's
weights.{error}

- *Collapse*: the first step from which the median of the newest five rewards is below half of the best for ten
  observations (`foreshock/diagnosis/collapse.py`; floor {REWARD_FLOOR:g}). It is *of mismatch* if the run's twin, with
  the same learning rate, seed and problems and no mismatch, did not collapse.
- *Tuning, locked*: seed s is for tuning if s mod {SEEDS_PER_CYCLE} = 0. Collapses after the first ten steps, which make
  the baseline, are *usable for leads*."""


def _responses(runs: list[Summary]) -> str:
    return f"""
## Dose and response

k3 of `trainer/rollout` is the median over steps {FIRST_STEP} to {LAST_STEP} before the collapse, then median and range
over the runs. Exact intervals are too narrow, because runs of one seed are alike. "Only it, only its twin": pairs of
which one collapsed; a harmful dose collapses in more of them than its twins.

{tables.dose_response(runs)}"""


def _leads(tuning: tables.Part, locked: tables.Part) -> str:
    return f"""
## Which signals lead

One simple alarm for each signal: the median of the newest five values is θ times the median of the first ten (1/θ for a
fall), with the lowest θ that makes at most {MOST_FALSE_ALARMS:g} false alarms per 1,000 healthy steps on the tuning
part. Scores are of the locked part; a hit starts 3 to min(200, t/2) steps before the collapse at t.

{tables.leads(tuning, locked)}"""


def _rules(parts: dict[str, tables.Part]) -> str:
    text = """## What Foreshock's own rules warn of

All default rules for a dense model, replayed step by step. Rules that hold at lag 0 only are silent for the doses
`lag…`. `foreshock backtest --full` prints what each rule gives on your own runs.
"""
    for name, part in parts.items():
        if part:
            text += f"\n{_of_mismatch(name, part)}\n"
    return text.strip()


def _of_mismatch(name: str, part: tables.Part) -> str:
    """Say how many collapses of mismatch a warning or critical alert stood before, and at what cost over all runs."""
    mismatch = [each[1] for each in part if each[0].kind == "mismatch"]
    warned = score(ALL_WARNINGS, mismatch, [warnings_of(run) for run in mismatch])
    everywhere = score(ALL_WARNINGS, [each[1] for each in part], [warnings_of(each[1]) for each in part])
    total = warned.hits + warned.misses
    rate = everywhere.false_alarms_per_1000
    reached = total > 0 and warned.hits >= AIMED_HITS * total and rate <= AIMED_FALSE_ALARMS
    return (
        f"Of the {name} part's usable collapses of mismatch, {tables.share(warned.hits, total)} were warned of at "
        f"least 3 steps before, at {rate:.1f} false alarms per 1,000 over all runs. The aim is {AIMED_HITS:.0%} at "
        f"{AIMED_FALSE_ALARMS:g}: {'reached' if reached else 'not reached'}."
    )


def main(arguments: list[str] | None = None) -> int:
    """Write the document. Returns 1 if `--check` finds that it is not current."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the document is not current")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    results = read_results(options.results)
    if not results:
        print(f"no results in {options.results}: make collapses", file=sys.stderr)
        return 1
    if not options.check:
        DOCUMENT.write_text(document(results))
        print(f"wrote {DOCUMENT}")
        return 0
    current = DOCUMENT.read_text() == document(results)
    print("current" if current else f"{DOCUMENT} is not current: python -m examples.collapses.analyse")
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
