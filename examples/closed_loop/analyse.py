"""Write docs/closed-loop.md from the results: `python -m examples.closed_loop.analyse`.

With `--check` nothing is written, and the exit status is 1 if the document is not that of the results.
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from examples.closed_loop.__main__ import RESULTS
from examples.closed_loop.outcome import (
    ArmOutcome,
    Outcome,
    against,
    best_safe_arm,
    compare,
    compared_seeds,
    distance_of_shams,
    mismatch_seeds,
    outcomes,
    paired_interval,
    pooled_interval,
)
from examples.closed_loop.plan import ARMS, FIRST_SEED, HARM, LAW_FIXED_AT, SEEDS, SETTINGS, Arm, Setting, plans
from examples.closed_loop.text import CLOSING, OPENING
from examples.collapses.results import Result, read_results
from examples.collapses.tables import NOTHING, markdown

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "closed-loop.md"

RIVALS: Final[tuple[Arm, ...]] = (
    "constant", "sham", "matched", "tenth", "cosine", "sequence-mis", "length-decay", "token-tis", "advice-mis",
)  # fmt: skip
LEAST_SEEDS: Final = 4
"""Of a setting in a comparison: intervals of fewer say little."""

LEAST_REWARD: Final = 0.98
LEAST_RATE: Final = 0.95
"""The bar of harm: shares of the constant arm's reward in the last fifth, and of its Σ η."""

_ADVICE: Final = (
    "Collapses are those of the constant arm. Before: collapsed seeds in which the advice had lowered the rate at "
    "least 3 steps earlier. Gain: the advice's reward of the last fifth minus the constant arm's."
)

_NOT_FILLED = ("#", "|", "-", "`", "<", "!")


def document(results: dict[str, Result], seeds: int = SEEDS) -> str:
    """Return the text of docs/closed-loop.md."""
    found = outcomes(results, seeds)
    planned = plans(seeds)
    compared = {
        setting: {each.arm: each for each in compare(found, setting.name, of)}
        for setting in (*SETTINGS, *HARM)
        if len(of := compared_seeds(found, setting.name)) >= LEAST_SEEDS
    }
    sections = [
        OPENING.format(
            progress=f"{len(found)} of {len(planned)} runs are done: {len(SETTINGS)} settings × {len(ARMS)} arms × "
            f"{seeds} seeds, and {len(HARM)} settings of harm × 2 arms × {seeds} seeds.",
            example=planned[2].name,
            law=LAW_FIXED_AT,
            first=FIRST_SEED,
            arms="\n".join(f"- `{arm}`: {meaning}." for arm, meaning in ARMS.items()),
        ),
        "## What the advice did",
        _ADVICE,
        _advice(found, compared),
        "## All arms",
        "Collapsed seeds, of those that the constant arm and the advice have:",
        _by_arm(compared, lambda each, _: str(each.collapsed)),
        "Reward of the last fifth; in bold the best safe arm:",
        _by_arm(
            compared, lambda each, safe: f"**{each.last_reward:.2f}**" if safe else f"{each.last_reward:.2f}", found
        ),
        "## The advice against each arm",
        _together(found),
        _behind(found),
        "## Harm: settings that learn well at a constant rate",
        f"The bar: {LEAST_REWARD:.0%} of the constant arm's reward of the last fifth, at {LEAST_RATE:.0%} of its Σ η.",
        _harm(compared),
        CLOSING,
    ]
    blocks = [block for block in "\n\n".join(section.strip() for section in sections).split("\n\n") if block]
    return (
        "\n\n".join(
            block if block.startswith(_NOT_FILLED) else textwrap.fill(block, 120, break_on_hyphens=False)
            for block in blocks
        )
        + "\n"
    )


Compared = dict[Setting, dict[Arm, ArmOutcome]]


def _advice(found: Sequence[Outcome], compared: Compared) -> str:
    """Return when the constant arm collapsed, and whether the advice had lowered the rate before."""
    rows = []
    for setting in SETTINGS:
        if setting not in compared:
            rows.append([f"`{setting.name}`", *[NOTHING] * 7])
            continue
        seeds, advice = compared_seeds(found, setting.name), compared[setting]["advice"]
        by = {(each.plan.arm, each.plan.seed): each for each in found if each.plan.setting == setting}
        collapses = {seed: step for seed in seeds if (step := by["constant", seed].collapse) is not None}
        changes = {seed: by["advice", seed].first_change or math.inf for seed in seeds}
        rows.append([
            f"`{setting.name}`",
            str(len(seeds)),
            str(len(collapses)),
            _range(list(collapses.values())),
            str(len(mismatch_seeds(found, setting.name, seeds))),
            f"{sum(changes[seed] <= step - 3 for seed, step in collapses.items())}/{len(collapses)}",
            _interval(advice.difference, advice.difference_interval, 2),
            f"{advice.learning_rate_share:.0%}",
        ])  # fmt: skip
    return markdown(("setting", "seeds", "collapses", "at steps", "of mismatch", "before", "gain (95 %)", "Σ η"), rows)


def _by_arm(compared: Compared, cell: Callable[[ArmOutcome, bool], str], found: Sequence[Outcome] = ()) -> str:
    """Return a table with a row an arm and a column a setting. `cell` is told whether the arm is the best safe one."""
    safe = {each: best_safe_arm(found, each.name, compared_seeds(found, each.name)) for each in compared if found}
    rows = []
    for arm in ARMS:
        cells = [
            cell(compared[each][arm], safe.get(each) == arm) if arm in compared.get(each, {}) else NOTHING
            for each in SETTINGS
        ]
        rows.append([f"`{arm}`", *cells])
    return markdown(("arm", *(f"`{each.name}`" for each in SETTINGS)), rows)


def _together(found: Sequence[Outcome]) -> str:
    """Compare the advice with each arm over all settings, each of equal weight: more than one setting may tell."""
    rows = []
    for arm in RIVALS:
        by_setting = [
            differences for each in SETTINGS if len(differences := against(found, each.name, arm)) >= LEAST_SEEDS
        ]
        if not by_setting:
            continue
        mean, (low, high) = float(np.mean([np.mean(each) for each in by_setting])), pooled_interval(by_setting)
        intervals = [paired_interval(each) for each in by_setting]
        rows.append([
            f"`{arm}`",
            _interval(mean, (low, high), 3),
            "more" if low > 0.0 else "less" if high < 0.0 else "cannot tell",
            str(sum(each[0] > 0.0 for each in intervals)),
            str(sum(each[1] < 0.0 for each in intervals)),
            str(len(by_setting)),
        ])  # fmt: skip
    text = (
        "The advice's reward of the last fifth minus that of another arm, of the same seeds: the mean of the "
        "settings' means. Ahead, behind: settings whose own interval excludes 0.\n\n"
    ) + markdown(("arm", "advice minus it (95 %)", "reward", "ahead", "behind", "settings"), rows)
    factors = [math.exp(value) for each in SETTINGS if (value := distance_of_shams(found, each.name)) > 0.0]
    if factors:
        text += (
            "\n\nThe sham follows what the loop did on another seed of the same setting, so that what the signals "
            "tell of a setting is in both. The two scales differ by a factor of "
            f"{min(factors):.2f} to {max(factors):.2f} (geometric mean over steps and seeds, by setting)."
        )
    return text


def _behind(found: Sequence[Outcome]) -> str:
    """Name the arms that are ahead of the advice in a setting, by its interval over seeds."""
    lines = []
    for setting in SETTINGS:
        for arm in RIVALS:
            differences = against(found, setting.name, arm)
            low, high = paired_interval(differences)
            if len(differences) >= LEAST_SEEDS and high < 0.0:
                lines.append(f"- `{setting.name}`: `{arm}` by {-np.mean(differences):.2f} ({-high:.2f} to {-low:.2f})")
    return "\n".join(["The advice is behind in:\n", *lines]) if lines else "The advice is behind in no setting."


def _harm(compared: Compared) -> str:
    """Return what the advice cost settings that learn well without it, beside the bar."""
    rows = []
    for setting in HARM:
        if setting not in compared:
            rows.append([f"`{setting.name}`", *[NOTHING] * 5])
            continue
        advice, constant = compared[setting]["advice"], compared[setting]["constant"]
        reward = advice.last_reward / constant.last_reward
        is_kept = reward >= LEAST_REWARD and advice.learning_rate_share >= LEAST_RATE
        rows.append([
            f"`{setting.name}`",
            f"{reward:.1%}",
            f"{advice.learning_rate_share:.0%}",
            _interval(advice.difference, advice.difference_interval, 2),
            f"{advice.collapsed}, {constant.collapsed}",
            "kept" if is_kept else "missed",
        ])  # fmt: skip
    header = ("setting", "reward", "Σ η", "advice minus constant (95 %)", "collapses: advice, constant", "bar")
    return markdown(header, rows)


def _interval(value: float, interval: tuple[float, float], digits: int) -> str:
    return f"{value:+.{digits}f} ({interval[0]:+.{digits}f} to {interval[1]:+.{digits}f})"


def _range(steps: Sequence[int]) -> str:
    return f"{min(steps)}–{max(steps)}" if steps else NOTHING


def main(arguments: list[str] | None = None) -> int:
    """Write or check the document. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the document is not current")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    results = read_results(options.results)
    text = document(results)
    if not options.check:
        DOCUMENT.write_text(text, "utf-8")
        print(f"{DOCUMENT}: {len(results)} runs")
        return 0
    if DOCUMENT.exists() and DOCUMENT.read_text("utf-8") == text:
        return 0
    print(f"{DOCUMENT} is not that of the results: run python -m examples.closed_loop.analyse", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
