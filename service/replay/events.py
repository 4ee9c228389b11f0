"""What happens to replayed scores that other nouns react to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScoresPublished:
    """A job has completed and its scores count from now on; `at_us` is the database's time."""

    run_id: str
    attempt: int
    step: int
    at_us: int
