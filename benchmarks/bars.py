"""The table and the line of key=value pairs that benchmarks print, and their exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table: a value and its bar, the largest allowed value, or with `at_least` the smallest.

    Without a bar, or if the value was not measured (None), the bar counts as reached.
    """

    key: str
    text: str
    value: float | None
    bar: float | None = None
    at_least: bool = False

    @property
    def is_reached(self) -> bool:
        """Return whether the value is on the right side of the bar."""
        if self.value is None or self.bar is None:
            return True
        return self.value >= self.bar if self.at_least else self.value <= self.bar


def report_parts(parts: Mapping[str, Callable[[], Sequence[Line]]], names: Sequence[str]) -> int:
    """Measure the named parts (no names: all) and report them; return 2 for an unknown name."""
    if unknown := sorted(set(names) - set(parts)):
        print(f"unknown part {unknown[0]!r}; parts: {', '.join(parts)}", file=sys.stderr)
        return 2
    return report([line for name in names or parts for line in parts[name]()])


def report(lines: Sequence[Line], **figures: float) -> int:
    """Print the lines beside their bars, and all values with `figures` as pairs; return 0 if every bar is reached."""
    width = max(len(line.text) for line in lines)
    print(f"\n{'':{width}}{'value':>14}{'bar':>14}")
    for line in lines:
        shown = [_shown(line.value), _shown(line.bar)]
        print(f"{line.text:{width}}{shown[0]:>14}{shown[1]:>14}{'' if line.is_reached else '  not reached'}")
    is_reached = all(line.is_reached for line in lines)
    values = {line.key: line.value for line in lines} | figures
    pairs = [f"{name}={'none' if value is None else f'{value:.6g}'}" for name, value in values.items()]
    print(*pairs, f"reached={str(is_reached).lower()}")
    return 0 if is_reached else 1


def _shown(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1e4 else f"{value:.4g}"
