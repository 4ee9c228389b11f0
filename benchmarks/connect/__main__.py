"""Is a trainer connected in few lines, without cost, without a lost rank, and with the framework's own numbers?

    python -m benchmarks.connect [PART …]

Parts, each a module beside this one: `lines`, `stall`, `statistics_mode` if this release has it, `k3`, `ranks`. Each
prints its table. The last line has all figures; exits 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from types import ModuleType

PARTS = ("lines", "stall", "statistics_mode", "k3", "ranks")


def main() -> int:
    """Run the chosen parts; return 1 if a bar is missed."""
    available = [name for name in PARTS if importlib.util.find_spec(f"benchmarks.connect.{name}")]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(available)}")
    chosen = parser.parse_args().parts or available
    if unknown := set(chosen) - set(available):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; parts: {', '.join(available)}")
    print(f"load average at the start: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    figures: dict[str, float] = {}
    missed = []
    for name in chosen:
        part = importlib.import_module(f"benchmarks.connect.{name}")
        print(f"\n{name}: {_title(part)}\n", flush=True)
        found = part.run()
        figures |= found
        if name == "statistics_mode":
            print("\n".join(f"{key:40}{value:16,.4g}" for key, value in found.items()))
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
