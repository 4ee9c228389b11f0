"""`make bench-queries`: each bar in a module of its own, with `measure() -> Bar`; names as arguments select some."""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.queries import curves, long_polls, scrape
from benchmarks.queries.bar import Bar

BARS: dict[str, Callable[[], Bar]] = {
    "curves": curves.measure,
    "scrape": scrape.measure,
    "long_polls": long_polls.measure,
}


def main(names: list[str]) -> int:
    """Measure the bars with these names, all without one; return 1 if one is not reached."""
    unknown = sorted(set(names) - set(BARS))
    if unknown:
        print(f"unknown bar {unknown[0]!r}; bars: {', '.join(BARS)}", file=sys.stderr)
        return 2
    bars = []
    for name in names or BARS:
        bar = BARS[name]()
        print("\n".join(bar.lines), flush=True)
        print(f"  {'reached' if bar.reached else 'NOT reached'}", flush=True)
        bars.append(bar)
    print(" ".join(f"{name}={value:.6g}" for bar in bars for name, value in bar.values.items()))
    return 0 if all(bar.reached for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
