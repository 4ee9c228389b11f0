"""A row of the table: one way to fail, what is expected of it, and the function that executes it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was seen, in a few words with its figures, and whether it is what was expected."""

    seen: str
    ok: bool


@dataclass(frozen=True, slots=True)
class Row:
    """A path of failure: `execute` takes it with the real client and the real service, each in a process.

    `expected` says in a few words what a user may rely on. A row that raises is not ok.
    """

    name: str
    expected: str
    execute: Callable[[], Outcome]


@dataclass(frozen=True, slots=True)
class Result:
    """A row that was executed, and the seconds that it took."""

    row: Row
    outcome: Outcome
    seconds: float


def execute(row: Row) -> Result:
    """Execute a row; an exception is its outcome, and its traceback is printed."""
    begun = time.monotonic()
    try:
        outcome = row.execute()
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(f"{type(error).__name__}: {error}".splitlines()[0][:200], ok=False)
    return Result(row, outcome, time.monotonic() - begun)
