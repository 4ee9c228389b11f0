"""Is a trainer connected without cost, and without a lost rank?

    python -m benchmarks.connect [PART …]

Parts, each a module beside this one: `stall`, `statistics_mode`, `ranks`. Each prints its table. The last line
has all figures; exits 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from types import ModuleType

PARTS = ("stall", "statistics_mode", "ranks")


def main() -> int:
    """Run the chosen parts; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(PARTS)}")
    chosen = parser.parse_args().parts or PARTS
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    print(f"load average at the start: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    figures: dict[str, float] = {}
    missed = []
    for name in chosen:
        part = importlib.import_module(f"benchmarks.connect.{name}")
        print(f"\n{name}: {_title(part)}\n", flush=True)
        found = part.run()
        figures |= found
        if not part.reached(found):
            missed.append(name)
    print()
    print(*(f"{name}={value:.4g}" for name, value in figures.items()), f"missed={','.join(missed) or 'none'}")
    return 1 if missed else 0


def _title(part: ModuleType) -> str:
    first = (part.__doc__ or "").partition("\n")[0]
    return first.partition("`make bench-connect`: ")[2] or first


if __name__ == "__main__":
    sys.exit(main())
