"""Measure the cost of connecting a trainer, and whether a rank is lost.

python -m benchmarks.connect [PART …]
"""

from __future__ import annotations

import sys

from benchmarks.bars import report_parts
from benchmarks.connect import ranks, stall, statistics_mode

PARTS = {"stall": stall.run, "statistics_mode": statistics_mode.run, "ranks": ranks.run}

if __name__ == "__main__":
    sys.exit(report_parts(PARTS, sys.argv[1:]))
