"""The events of replayed scores."""

from __future__ import annotations

from dataclasses import dataclass

from foreshock_service.runs.events import StepEvent


@dataclass(frozen=True, slots=True)
class ScoresPublished(StepEvent):
    """A job is complete and its scores of the step count; `at_us` is the database's time.

    Published without a lock of the run, in the transaction that publishes the scores and again after its commit.
    """

    at_us: int
