"""The key of a step: run, attempt and number. A step of two attempts is two steps, one of which is active."""

from __future__ import annotations

from typing import NamedTuple


class StepKey(NamedTuple):
    """(run, attempt, step), in the order of the tables' primary keys."""

    run_id: str
    attempt: int
    step: int
