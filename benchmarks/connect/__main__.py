"""Is a trainer connected without cost, and without a lost rank?

    python -m benchmarks.connect [PART …]

Parts, each a module beside this one with `run() -> list[Line]`: `stall`, `statistics_mode`, `ranks`.
"""

from __future__ import annotations

import importlib
import sys

from benchmarks.bars import Line, report

PARTS = ("stall", "statistics_mode", "ranks")


def main(names: list[str]) -> int:
    """Run the chosen parts; return 1 if a bar is missed."""
    if unknown := set(names) - set(PARTS):
        print(f"unknown part {min(unknown)!r}; parts: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    lines: list[Line] = []
    for name in names or PARTS:
        print(f"\n{name}\n", flush=True)
        lines += importlib.import_module(f"benchmarks.connect.{name}").run()
    return report(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
