"""Attributions as the service answers them."""

from dataclasses import asdict
from typing import Any

from foreshock.api.attribution import AttributionRecord
from foreshock.api.records import parse
from foreshock.measures.estimators.attribution import METHOD, Attribution


def attribution_of(step: int, found: Attribution, **fields: Any) -> AttributionRecord:
    """Return the attribution of a step without floors, exact divergences and conclusions."""
    empty = dict.fromkeys(("floors", "scores", "exact", "conclusions"), ())
    flags = {"from_sample": False, "stale": False, "of_rollouts": found.rollouts, "computed_at_us": 1, "method": METHOD}
    return parse(
        AttributionRecord, {"run": "run_1", "step": step, "attempt": 1, **empty, **flags, **asdict(found), **fields}
    )
