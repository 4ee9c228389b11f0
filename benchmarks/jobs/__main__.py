"""What do other weights cost a worker, and what do kills leave behind? `make bench-jobs`.

1. Part `weights`: six checkpoints through vLLM by one worker against one checkpoint six times (`other_weights.py`).
2. Part `kills`: 200 jobs on tiny models while workers are killed and frozen at random (`kills.py`).

`--only kills --jobs 40` runs a part, with fewer jobs.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.jobs import kills, other_weights

PARTS = ("weights", "kills")


def main() -> int:
    """Run the chosen parts; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=PARTS, help="run one part only")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the part `weights`")
    parser.add_argument("--jobs", type=int, default=200, help="jobs of the part `kills`")
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    arguments = parser.parse_args()
    reached, figures, begun = True, dict[str, str](), time.monotonic()
    if arguments.only != "kills":
        ok, found = other_weights.main(arguments.rounds)
        reached, figures = reached and ok, figures | found
    if arguments.only != "weights":
        ok, found = kills.main(arguments.jobs, arguments.seed)
        reached, figures = reached and ok, figures | found | {"seed": str(arguments.seed)}
    print(*(f"{name}={value}" for name, value in figures.items()), f"seconds={time.monotonic() - begun:.0f}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
