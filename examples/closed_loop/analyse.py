"""Write docs/closed-loop.md from the results: `python -m examples.closed_loop.analyse`.

With `--check` nothing is written, and the exit status is 1 if the document is not that of the results.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from examples.closed_loop.__main__ import RESULTS
from examples.closed_loop.outcome import (
    ArmOutcome,
    Outcome,
    best_safe_arm,
    compare,
    compared_seeds,
    outcomes,
)
from examples.closed_loop.plan import ARMS, FIRST_SEED, HARM, LAW_FIXED_AT, SEEDS, SETTINGS, Arm, Setting, plans
from examples.closed_loop.text import CLOSING, OPENING
from examples.collapses.results import Result, read_results
from examples.collapses.tables import NOTHING, markdown

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "closed-loop.md"

LEAST_SEEDS: Final = 4
"""Of a setting in a comparison: intervals of fewer say little."""

_NOT_FILLED = ("#", "|", "-", "`", "<", "!")


def document(results: dict[str, Result], seeds: int = SEEDS) -> str:
    """Return the text of docs/closed-loop.md."""
    found = outcomes(results, seeds)
    planned = plans(seeds)
    compared = {
        setting: {each.arm: each for each in compare(found, setting.name, of)}
        for setting in SETTINGS
        if len(of := compared_seeds(found, setting.name)) >= LEAST_SEEDS
    }
    sections = [
        OPENING.format(
            progress=f"{len(found)} of {len(planned)} runs are done: {len(SETTINGS)} settings × {len(ARMS)} arms × "
            f"{seeds} seeds, and {len(HARM)} settings of harm × 2 arms × {seeds} seeds.",
            law=LAW_FIXED_AT,
            first=FIRST_SEED,
            arms="\n".join(f"- `{arm}`: {meaning}." for arm, meaning in ARMS.items()),
        ),
        "Reward of the last fifth of the steps, in brackets the collapsed seeds; in bold the best safe arm:",
        _by_arm(compared, found),
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


def _by_arm(compared: Compared, found: Sequence[Outcome]) -> str:
    """Return the table of rewards and collapses, with a row an arm and a column a setting."""
    safe = {each: best_safe_arm(found, each.name, compared_seeds(found, each.name)) for each in compared}
    rows = []
    for arm in ARMS:
        cells = [
            _cell(compared[each][arm], is_safe=safe[each] == arm) if arm in compared.get(each, {}) else NOTHING
            for each in SETTINGS
        ]
        rows.append([f"`{arm}`", *cells])
    return markdown(("arm", *(f"`{each.name}`" for each in SETTINGS)), rows)


def _cell(each: ArmOutcome, *, is_safe: bool) -> str:
    reward = f"**{each.last_reward:.2f}**" if is_safe else f"{each.last_reward:.2f}"
    return f"{reward} ({each.collapsed})" if each.collapsed else reward


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
