"""Write docs/closed-loop.md and its plot from the results: `python -m examples.closed_loop.analyse`.

With `--check` nothing is written, and the exit status is 1 if the document is not that of the results.
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from examples.closed_loop.__main__ import RESULTS
from examples.closed_loop.outcome import (
    ArmOutcome,
    Outcome,
    against,
    arms_with,
    best_safe_arm,
    compare,
    compared_seeds,
    distance_of_shams,
    mismatch_seeds,
    outcomes,
    paired_interval,
    pooled_interval,
    setting_names,
)
from examples.closed_loop.plan import ARMS, FIRST_SEED, HARM, LAW_FIXED_AT, SEEDS, SETTINGS, Arm, Plan, Setting, plans
from examples.closed_loop.text import CLOSING, OPENING, REASONS
from examples.collapses.results import Result, read_results
from foreshock.commands.report_page import Series, svg_curve
from foreshock.diagnosis.quantities import REWARD_KEY

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "closed-loop.md"
IMAGES: Final = DOCUMENT.parent / "images"

RIVALS: Final[tuple[Arm, ...]] = ("sham", "matched", "tenth", "cosine", "sequence-mis", "length-decay")
DRAWN: Final[tuple[Arm, ...]] = ("constant", "advice", "cosine", "sequence-mis")
COLOURS: Final = ("#c0392b", "#2471a3", "#7d8790", "#b9770e")
TRAILING_STEPS: Final = 5
LEAST_SEEDS: Final = 4
"""Of a setting in the comparison over all settings: intervals of fewer say little."""

LEAST_REWARD: Final = 0.98
LEAST_RATE: Final = 0.95
"""The bar of harm: shares of the constant arm's reward in the last fifth, and of its Σ η."""

_NOT_FILLED = ("#", "|", "-", "`", "<", "!")


def document(results: dict[str, Result], seeds: int = SEEDS) -> str:
    """Return the text of docs/closed-loop.md."""
    found = outcomes(results, seeds)
    planned = plans(seeds)
    sections = [
        OPENING.format(
            progress=f"{len(found)} of {len(planned)} runs are done: {len(SETTINGS)} settings × {len(ARMS)} arms × "
            f"{seeds} seeds, and {len(HARM)} settings of harm × 2 arms × {seeds} seeds.",
            example=planned[2].name,
            law=LAW_FIXED_AT,
            first=FIRST_SEED,
            arms="\n".join(f"- `{arm}`: {meaning}." for arm, meaning in ARMS.items()),
        ),
        *(_setting(setting, found) for setting in SETTINGS),
        "## All settings together",
        _together(found),
        "## Harm: settings that learn well at a constant rate",
        *(_setting(setting, found) for setting in HARM),
        "## Where the advice loses, and why",
        _losses(found),
        REASONS,
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


def plots(results: dict[str, Result], seeds: int = SEEDS) -> dict[str, str]:
    """Return the plot of each setting that has complete seeds, by file name."""
    found = outcomes(results, seeds)
    drawn = {}
    for setting in SETTINGS:
        seeds_of = compared_seeds(found, setting.name)
        if len(seeds_of) >= 2:
            drawn[plot_name(setting)] = _plot(setting, results, seeds_of, arms_with(found, setting.name, seeds_of))
    return drawn


def plot_name(setting: Setting) -> str:
    return f"closed-loop-{setting.name}.svg"


def _setting(setting: Setting, found: Sequence[Outcome]) -> str:
    complete = compared_seeds(found, setting.name)
    title = f"## Setting `{setting.name}`"
    if len(complete) < 2:
        return f"{title}\n\nNot measured yet: fewer than two seeds of it have the constant arm and the advice."
    of_mismatch = mismatch_seeds(found, setting.name, complete)
    arms = compare(found, setting.name, complete)
    if setting in HARM:
        return "\n\n".join([title, _harm(arms), _table(arms, best_safe_arm(found, setting.name, complete))])
    parts = [
        title,
        f"{len(complete)} seeds. {_collapses(found, setting.name, complete, of_mismatch)}",
        f"![Reward by step, one line an arm](images/{plot_name(setting)})",
        _table(arms, best_safe_arm(found, setting.name, complete)),
        _reading(arms),
        _advice(found, setting.name, complete),
        _against_rivals(found, setting.name),
        _missing(found, setting, complete),
    ]
    if len(of_mismatch) >= 2 and len(of_mismatch) < len(complete):
        parts += [
            f"Only the {len(of_mismatch)} seeds whose collapse is of mismatch:",
            _table(compare(found, setting.name, of_mismatch), best_safe_arm(found, setting.name, of_mismatch)),
        ]
    return "\n\n".join(parts)


def _harm(arms: Sequence[ArmOutcome]) -> str:
    """Say what the advice cost a setting that learns well without it, beside the bar."""
    by = {each.arm: each for each in arms}
    advice, constant = by["advice"], by["constant"]
    reward = advice.last_reward / constant.last_reward
    low, high = advice.difference_interval
    is_kept = reward >= LEAST_REWARD and advice.learning_rate_share >= LEAST_RATE
    verdict = "Less reward" if high < 0.0 else "More reward" if low > 0.0 else "The reward cannot be told apart"
    return (
        f"{advice.runs} seeds. With the advice the reward of the last fifth is {reward:.1%} of that of the constant "
        f"arm, at {advice.learning_rate_share:.0%} of its Σ η: {'within' if is_kept else 'it misses'} the bar of "
        f"{LEAST_REWARD:.0%} and {LEAST_RATE:.0%}. {verdict}, by the interval over seeds. It collapsed in "
        f"{advice.collapsed} of them, the constant arm in {constant.collapsed}."
    )


def _collapses(found: Sequence[Outcome], setting: str, seeds: Sequence[int], of_mismatch: Sequence[int]) -> str:
    constant = [
        each.collapse
        for each in found
        if each.plan.setting.name == setting and each.plan.arm == "constant" and each.plan.seed in seeds
    ]
    steps = sorted(step for step in constant if step is not None)
    if not steps:
        return "The constant arm collapsed in none of them, so this setting says nothing about a collapse."
    return (
        f"The constant arm collapsed in {len(steps)} of them, at steps {', '.join(map(str, steps))}; "
        f"{len(of_mismatch)} of these collapses are of mismatch."
    )


def _table(arms: Sequence[ArmOutcome], safe: Arm) -> str:
    rows = [
        "| arm | collapsed (95 %) | saved (95 %) | reward, last fifth | minus constant (95 %) | Σ η |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in arms:
        name = f"`{each.arm}`" + (" (best safe arm)" if each.arm == safe else "")
        low, high = each.difference_interval
        difference = "–" if each.arm == "constant" else f"{each.difference:+.2f} ({low:+.2f} to {high:+.2f})"
        rows.append(
            f"| {name} | {_share(each.collapsed, each.runs, each.collapsed_interval)} | "
            f"{_share(each.saved, each.runs, each.saved_interval)} | {each.last_reward:.2f} | {difference} | "
            f"{each.learning_rate_share:.0%} |"
        )
    return "\n".join(rows)


def _share(count: int, total: int, interval: tuple[float, float]) -> str:
    return f"{count}/{total} ({interval[0]:.0%}–{interval[1]:.0%})"


def _reading(arms: Sequence[ArmOutcome]) -> str:
    """Say of each arm only what its interval allows."""
    better = [f"`{each.arm}`" for each in arms if each.difference_interval[0] > 0.0 and each.arm != "twin"]
    worse = [f"`{each.arm}`" for each in arms if each.difference_interval[1] < 0.0 and each.arm != "twin"]
    unclear = [
        f"`{each.arm}`"
        for each in arms
        if each.arm not in ("constant", "twin") and each.difference_interval[0] <= 0.0 <= each.difference_interval[1]
    ]
    said = [
        f"More reward at the end than the constant arm: {', '.join(better) or 'no arm'}.",
        f"Less: {', '.join(worse) or 'no arm'}.",
        f"Cannot tell: {', '.join(unclear) or 'no arm'}.",
    ]
    return " ".join(said)


def _advice(found: Sequence[Outcome], setting: str, seeds: Sequence[int]) -> str:
    by = {(each.plan.arm, each.plan.seed): each for each in found if each.plan.setting.name == setting}
    acted = [by["advice", seed] for seed in seeds if by["advice", seed].first_change is not None]
    before = sum(
        1
        for each in acted
        for collapse in (by["constant", each.plan.seed].collapse,)
        if collapse is not None and each.first_change is not None and each.first_change <= collapse - 3
    )
    collapsed = sum(by["constant", seed].collapse is not None for seed in seeds)
    return (
        f"The advice lowered the learning rate in {len(acted)} of {len(seeds)} runs; in {before} of the {collapsed} "
        "seeds whose constant arm collapsed it did so at least 3 steps before that arm's collapse."
    )


def _against_rivals(found: Sequence[Outcome], setting: str) -> str:
    """Say whether the advice gained more than the other arms, by paired intervals."""
    said = []
    for arm in RIVALS:
        differences = against(found, setting, arm)
        if len(differences) < 2:
            continue
        low, high = paired_interval(differences)
        verdict = "more" if low > 0.0 else "less" if high < 0.0 else "cannot tell"
        said.append(
            f"`{arm}` {np.mean(differences):+.2f} ({low:+.2f} to {high:+.2f}; {len(differences)} seeds; {verdict})"
        )
    if not said:
        return "No other arm has two seeds in common with the advice."
    return f"The advice's last reward minus that of the other arms, over the seeds that both have: {', '.join(said)}."


def _together(found: Sequence[Outcome]) -> str:
    """Compare the advice with each arm over all settings, each of equal weight: more than one setting may tell."""
    rows = []
    for arm in ("constant", *RIVALS, "token-tis", "advice-mis"):
        by_setting = [
            differences for each in SETTINGS if len(differences := against(found, each.name, arm)) >= LEAST_SEEDS
        ]
        if len(by_setting) < 2:
            continue
        mean, (low, high) = np.mean([np.mean(each) for each in by_setting]), pooled_interval(by_setting)
        intervals = [paired_interval(each) for each in by_setting]
        ahead, behind = sum(each[0] > 0.0 for each in intervals), sum(each[1] < 0.0 for each in intervals)
        verdict = "more" if low > 0.0 else "less" if high < 0.0 else "cannot tell"
        counts = f"{ahead} | {behind} | {len(by_setting)} | {sum(map(len, by_setting))}"
        rows.append(f"| `{arm}` | {mean:+.3f} ({low:+.3f} to {high:+.3f}) | {verdict} | {counts} |")
    if not rows:
        return f"No arm has {LEAST_SEEDS} seeds in common with the advice in two settings yet."
    head = (
        "The advice's reward in the last fifth minus that of another arm, of the same seeds: the mean of the settings' "
        f"means, of those with at least {LEAST_SEEDS} seeds. Ahead, behind: settings in which the interval of the "
        "setting alone excludes 0."
    )
    columns = "| arm | advice minus it (95 %) | | ahead | behind | settings | runs |"
    table = "\n".join([f"{head}\n", columns, "| --- | ---: | --- | ---: | ---: | ---: | ---: |", *rows])
    factors = [math.exp(value) for each in SETTINGS if (value := distance_of_shams(found, each.name)) > 0.0]
    if not factors:
        return table
    return (
        f"{table}\n\nThe sham follows what the same loop did on another seed of the same setting, so that what the "
        "signals tell of a setting is in both. The two scales differ by a factor of "
        f"{min(factors):.2f} to {max(factors):.2f} (the geometric mean over steps and seeds, by setting)."
    )


def _losses(found: Sequence[Outcome]) -> str:
    """Say where another arm is ahead, by its interval over seeds, and where a bar of harm is missed."""
    said, measured = [], 0
    for setting in SETTINGS:
        ahead = []
        for arm in (*RIVALS, "constant", "token-tis", "advice-mis"):
            differences = against(found, setting.name, arm)
            if len(differences) >= 2:
                measured += 1
                low, high = paired_interval(differences)
                if high < 0.0:
                    ahead.append(f"`{arm}` by {-np.mean(differences):.2f} ({-high:.2f} to {-low:.2f})")
        if ahead:
            said.append(f"- `{setting.name}`: {', '.join(ahead)} of reward in the last fifth.")
    for setting in HARM:
        seeds = compared_seeds(found, setting.name)
        if len(seeds) >= 2:
            measured += 1
            text = _harm(compare(found, setting.name, seeds))
            said += [f"- `{setting.name}`: {text}"] if "it misses the bar" in text else []
    if not said:
        return f"In none of the {measured} comparisons made so far, by their intervals over seeds and the bars of harm."
    return "\n".join(
        [f"Of {measured} comparisons made so far another arm is ahead, or a bar of harm is missed, in:\n", *said]
    )


def _missing(found: Sequence[Outcome], setting: Setting, seeds: Sequence[int]) -> str:
    missing = [f"`{arm}`" for arm in ARMS if arm not in arms_with(found, setting.name, seeds)]
    return f"Not measured yet for all of these seeds: {', '.join(missing)}." if missing else ""


def _plot(setting: Setting, results: dict[str, Result], seeds: Sequence[int], measured: Sequence[Arm]) -> str:
    drawn = [arm for arm in DRAWN if arm in measured]
    series = [Series(arm, _median_reward(setting, arm, results, seeds)) for arm in drawn]
    steps = list(range(1, len(series[0].values) + 1))
    picture = svg_curve("Median reward over seeds", steps, series)
    colours = "".join(f".series-{place}{{stroke:{colour}}}" for place, colour in enumerate(COLOURS, start=1))
    style = (
        "<style>text{font:10px sans-serif;fill:#5c6670}.grid{stroke:#c9d0d6;stroke-width:.5}"
        f".line{{fill:none;stroke-width:1.6}}{colours}</style>"
    )
    legend = "".join(
        f'<text x="{70 + 110 * place}" y="22" style="fill:{colour}">{arm}</text>'
        for place, (arm, colour) in enumerate(zip(drawn, COLOURS, strict=False))
    )
    opening = picture.index(">") + 1
    head = picture[:opening].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return f"{head}{style}{picture[opening:].removesuffix('</svg>')}{legend}</svg>\n"


def _median_reward(setting: Setting, arm: Arm, results: dict[str, Result], seeds: Sequence[int]) -> list[float]:
    """Return the median over seeds of the trailing mean reward of five steps; steps that a run lacks count as 0."""
    planned = Plan(setting, arm, seeds[0]).settings.steps
    rewards = np.zeros((len(seeds), planned))
    for row, seed in enumerate(seeds):
        found = results[Plan(setting, arm, seed).name]
        rewards[row, found.steps - 1] = found.columns[REWARD_KEY]
    kernel = np.ones(TRAILING_STEPS)
    counts = np.convolve(np.ones(planned), kernel)[:planned]
    trailing = np.stack([np.convolve(row, kernel)[:planned] / counts for row in rewards])
    return [float(value) for value in np.median(trailing, axis=0)]


def main(arguments: list[str] | None = None) -> int:
    """Write or check the document. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the document is not current")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    results = read_results(options.results)
    wanted = {DOCUMENT: document(results)} | {IMAGES / name: text for name, text in plots(results).items()}
    if options.check:
        stale = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
        for path in stale:
            print(f"{path} is not that of the results: run python -m examples.closed_loop.analyse", file=sys.stderr)
        return 1 if stale else 0
    for path, text in wanted.items():
        path.write_text(text, "utf-8")
    print(f"{DOCUMENT}: {len(results)} runs, settings {', '.join(setting_names())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
