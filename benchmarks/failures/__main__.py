"""Does any failure harm a trainer, or lose what was sent? `make bench-failures`.

Each row takes one path of failure with the real client and the real service, each in a process of its own: a disk that
is full, a connection by TLS that hangs, the end of the interpreter, a restart, a database of an earlier release. The
table has a row each: what was expected, and what was seen. Bar: all rows are ok.

    python -m benchmarks.failures --only full-disk-at-start --only exit-on-each-python
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.failures import client_rows, replay_rows, service_rows
from benchmarks.failures.rows import Result, execute

ROWS = [*client_rows.ROWS, *service_rows.ROWS, *replay_rows.ROWS]


def main() -> int:
    """Execute the rows and print the table; return 1 if one of them is not ok."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[row.name for row in ROWS], help="a row; may be repeated")
    wanted = parser.parse_args().only
    return report([execute(row) for row in ROWS if not wanted or row.name in wanted])


def report(results: list[Result]) -> int:
    """Print what was expected and seen, and the line of key=value pairs; return 0 if every row is ok."""
    cells = [
        (each.row.name, each.row.expected, each.outcome.seen, "yes" if each.outcome.ok else "NO", f"{each.seconds:.0f}")
        for each in results
    ]
    table = [("failure", "expected", "seen", "ok", "seconds"), *cells]
    widths = [max(len(line[column]) for line in table) for column in range(5)]
    print()
    for line in table:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
    ok = sum(each.outcome.ok for each in results)
    print(f"rows={len(results)} ok={ok} reached={str(ok == len(results)).lower()}")
    return 0 if ok == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
