"""The golden results on disk: one compressed JSON file a history; `python -m tests.golden.store` writes them anew."""

from __future__ import annotations

import gzip
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.running_service import running_service
from tests.golden.answers import backtest, collect, comparable, log_history
from tests.golden.histories import History, histories

RECORDED = Path(__file__).parent / "recorded"
RELATIVE = 1e-12
"""Largest relative difference of two numbers; all else is equal exactly."""
SETTINGS = {
    "FORESHOCK_SWEEP_INTERVAL_SECONDS": "0.5",
    "FORESHOCK_MAX_SCALARS": "1000",
    # Most histories are scalars.
    "FORESHOCK_DECODE_PROCESSES": "1",
}


def results_of(url: str, history: History, folder: Path, expected: dict[str, Any] | None = None) -> dict[str, Any]:
    """Log a history to a running service and return all that it says of it."""

    def is_expected(name: str, answer: Any) -> bool:
        return expected is not None and next(differences(expected.get(name), answer), None) is None

    with httpx.Client(base_url=url, timeout=120) as http:
        found = collect(log_history(http, history), history, is_expected if expected else None)
    return found if history.looked_at else found | {"command:backtest": backtest(history, folder)}


def read(name: str) -> dict[str, Any]:
    """Return the golden results of a history."""
    found: dict[str, Any] = json.loads(gzip.decompress((RECORDED / f"{name}.json.gz").read_bytes()))
    return {of: comparable(answer) for of, answer in found.items()}


def differences(expected: Any, found: Any, path: str = "", upper_end: Any = None) -> Iterator[str]:
    """Yield a line for each place where two results differ.

    `upper_end`: that of the intervals whose lower ends are compared, which are rounded in proportion to it, as a lower
    end near 0 is the difference of two larger numbers.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() | found.keys()):
            upper_end = expected.get(f"{key.removesuffix('_low')}_high") if key.endswith("_low") else None
            yield from differences(
                expected.get(key, "<absent>"), found.get(key, "<absent>"), f"{path}/{key}", upper_end
            )
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            end = upper_end[number] if isinstance(upper_end, list) else None
            yield from differences(one, other, f"{path}[{number}]", end)
    elif isinstance(expected, float) and isinstance(found, float | int) and not isinstance(found, bool):
        rounding = RELATIVE * abs(upper_end) if isinstance(upper_end, float) else 1e-300
        if not math.isclose(expected, found, rel_tol=RELATIVE, abs_tol=rounding):
            yield f"{path}: expected {expected!r}, got {found!r}"
    elif isinstance(expected, str) and isinstance(found, str) and "\n" in expected:
        yield from _differing_lines(expected.splitlines(), found.splitlines(), path)
    elif expected != found:
        yield f"{path}: expected {expected!r:.300}, got {found!r:.300}"


def _differing_lines(expected: list[str], found: list[str], path: str) -> Iterator[str]:
    if len(expected) != len(found):
        yield f"{path}: expected {len(expected)} lines, got {len(found)}"
    for number, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            yield f"{path}:{number}: expected {one!r}, got {other!r}"


def main() -> None:
    chosen = sys.argv[1:] or list(histories())
    RECORDED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, running_service(Path(name), **SETTINGS) as url:
        for history in chosen:
            found = results_of(url, histories()[history], Path(name))
            text = json.dumps(found, sort_keys=True, indent=1, ensure_ascii=False).encode()
            (RECORDED / f"{history}.json.gz").write_bytes(gzip.compress(text, mtime=0))
            print(history, len(text), "bytes")


if __name__ == "__main__":
    main()
