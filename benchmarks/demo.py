"""Time `make demo` as a user runs it, in a fresh clone of what is committed. Three starts:

with installs   a new folder, a new environment, nothing cached          bar 12 minutes
with packages   the same folder, what the first start stored removed     bar  5 minutes
second start    nothing removed: no work is repeated                     bar 60 seconds
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def seconds_of_demo(clone: Path) -> float:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("VENV", "VIRTUAL_ENV", "MAKEFLAGS")
    }
    begin = time.monotonic()
    subprocess.run(["make", "demo", "ONCE=1"], cwd=clone, check=True, env={**environment, "PIP_NO_CACHE_DIR": "1"})
    return time.monotonic() - begin


def main() -> int:
    results: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory(prefix="foreshock-demo-") as folder:
        clone = Path(folder) / "foreshock"
        subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
        results.append(("with_installs", seconds_of_demo(clone), 720))
        subprocess.run(["rm", "-rf", str(clone / "foreshock-data")], check=True)
        results.append(("with_packages", seconds_of_demo(clone), 300))
        results.append(("second_start", seconds_of_demo(clone), 60))
    print(f"\n{'start':16s} {'seconds':>8s} {'bar':>6s}")
    for name, seconds, bar in results:
        print(f"{name:16s} {seconds:8.1f} {bar:6.0f}")
    reached = all(seconds <= bar for _, seconds, bar in results)
    print(" ".join(f"{name}_seconds={seconds:.1f}" for name, seconds, _ in results), f"reached={str(reached).lower()}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
