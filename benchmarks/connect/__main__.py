"""Measure the cost of connecting a trainer, whether a rank is lost, what hooks make of changed data, and of files.

python -m benchmarks.connect [PART …]
"""

from __future__ import annotations

import sys

from benchmarks.bars import report_parts
from benchmarks.connect import bad_columns, files, frameworks, mutations, ranks, stall, statistics_mode

PARTS = {
    "files": files.run, "stall": stall.run, "statistics_mode": statistics_mode.run, "ranks": ranks.run,
    "mutations": mutations.run, "bad_columns": bad_columns.run, "frameworks": frameworks.run,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(report_parts(PARTS, sys.argv[1:]))
