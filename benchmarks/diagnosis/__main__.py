"""Measure what the diagnosis finds: `make bench-diagnosis`; names of families select some."""

from __future__ import annotations

import sys

from benchmarks.bars import report_parts
from benchmarks.diagnosis import collapses, declines, field_kinds, histories, logs, reports, surfaces, surges

FAMILIES = {
    "collapses": collapses.measure,
    "declines": declines.measure,
    "logs": logs.measure,
    "surges": surges.measure,
    "field_kinds": field_kinds.measure,
    "histories": histories.measure,
    "reports": reports.measure,
    "surfaces": surfaces.measure,
    "healthy_runs": histories.measure_healthy,
}

if __name__ == "__main__":
    sys.exit(report_parts(FAMILIES, sys.argv[1:]))
