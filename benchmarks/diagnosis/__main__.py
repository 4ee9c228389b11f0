"""Measure what the diagnosis finds, one line a family; exit 1 if a bar is missed.

    make bench-diagnosis

A family is a module with `measure() -> Family`.
"""

from __future__ import annotations

import sys

from benchmarks.diagnosis import collapses, field_kinds, logs, surges

FAMILIES = (collapses, logs, surges, field_kinds)


def main() -> int:
    """Measure every family; return 1 if one misses a bar."""
    reached, results = True, list[str]()
    for family in FAMILIES:
        measured = family.measure()
        name = family.__name__.rpartition(".")[2]
        print(f"{name:10} {'reached' if measured.reached else 'MISSED '} {', '.join(measured.results)}", flush=True)
        reached = reached and measured.reached
        results += measured.results
    print(f"reached={reached} {' '.join(results)}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
