"""The frameworks of docs/your-framework.md, counted: how they were tried, what they obey, how much a user writes."""

from __future__ import annotations

from benchmarks.bars import Line
from scripts.frameworks_page import FRAMEWORKS


def run() -> list[Line]:
    """Return the counts."""
    real = [each for each in FRAMEWORKS if each.tried != "read"]
    obeys = {lever: [each for each in FRAMEWORKS if lever in each.obeys] for lever in ("rate", "correction")}
    really = [each for each in obeys["correction"] if each in real]
    return [
        Line("frameworks", "frameworks in the table", len(FRAMEWORKS), 14, at_least=True),
        Line("frameworks_real", "with a real class, training or dump", len(real), 8, at_least=True),
        Line("obey_rate", "that obey the rate", len(obeys["rate"]), 10, at_least=True),
        Line("obey_correction", "that obey the correction", len(obeys["correction"]), 3, at_least=True),
        Line("obey_correction_real", "of these with a real class or training", len(really), 3, at_least=True),
        Line("lines_most", "most lines that a user writes", max(len(each.lines) for each in FRAMEWORKS), 5),
    ]
