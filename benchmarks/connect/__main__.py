"""Measure the cost of connecting a trainer, whether a rank is lost, and what hooks make of changed data.

python -m benchmarks.connect [PART …]
"""

from __future__ import annotations

import sys

from benchmarks.bars import report_parts
from benchmarks.connect import mutations, ranks, stall, statistics_mode

PARTS = {"stall": stall.run, "statistics_mode": statistics_mode.run, "ranks": ranks.run, "mutations": mutations.run}

if __name__ == "__main__":
    sys.exit(report_parts(PARTS, sys.argv[1:]))
