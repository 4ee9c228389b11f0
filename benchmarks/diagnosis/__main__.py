"""Measure what the diagnosis finds: `make bench-diagnosis`. A family is a module with `measure() -> list[Line]`."""

from __future__ import annotations

import sys

from benchmarks.bars import report
from benchmarks.diagnosis import collapses, field_kinds, logs, surges

FAMILIES = (collapses, logs, surges, field_kinds)

if __name__ == "__main__":
    sys.exit(report([line for family in FAMILIES for line in family.measure()]))
