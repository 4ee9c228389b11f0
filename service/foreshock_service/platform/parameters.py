"""Parameters of requests, and shared types of fields."""

import math
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from foreshock.api import runs
from foreshock_service.platform import request_guards
from foreshock_service.platform.problem import InvalidRequest

LARGEST_STEP = runs.LARGEST_STEP
_DEEPEST = 16
LARGEST_INTEGER = 2**63 - 1
NO_NUL = r"^[^\x00]*$"
"""Pattern of texts: PostgreSQL stores no NUL and refuses to compare with one."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=runs.LONGEST_NAME, pattern=runs.NAME_PATTERN)]
Step = Annotated[int, Field(ge=0, le=LARGEST_STEP)]
AttemptNumber = Annotated[int, Field(ge=1, le=LARGEST_STEP)]
StepPath = Annotated[int, Path(ge=0, le=LARGEST_STEP)]
AttemptQuery = Annotated[int, Query(ge=1, le=LARGEST_STEP)]
ActiveOrAttempt = Annotated[
    int | None, Query(ge=1, le=LARGEST_STEP, description="one attempt; absent: the active steps")
]
FromStep = Annotated[int, Query(ge=0, le=LARGEST_STEP)]
MaxPoints = Annotated[
    int | None, Query(ge=2, le=1_000_000, description="rows per curve, keeping the extremes of each; absent: all rows")
]
ToStep = Annotated[int, Query(ge=0, le=LARGEST_STEP, description="included")]


def is_storable_text(text: str) -> bool:
    """Return whether both databases can store the text: no NUL and no lone surrogate."""
    return "\x00" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def storable_json(value: dict[str, Any]) -> dict[str, Any]:
    """Return the value if JSONB can hold it; raises ValueError for NUL, non-finite numbers and too deep nesting."""
    _check_json(value, _DEEPEST)
    return value


def _check_json(value: Any, depth: int) -> None:
    if depth == 0:
        raise ValueError(f"is nested more than {_DEEPEST} levels deep")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("holds a number that is not finite")
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise ValueError("holds an integer beyond 64 bits")
    if isinstance(value, str):
        if not is_storable_text(value):
            raise ValueError("holds text that cannot be stored (NUL or a lone surrogate)")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_json(key, depth - 1)
            _check_json(item, depth - 1)
    elif isinstance(value, list):
        for item in value:
            _check_json(item, depth - 1)


JsonObject = Annotated[dict[str, Any], AfterValidator(storable_json)]


SEGMENT_PATTERN = r"^[^\x00-\x1e\x7f]+$"
"""Pattern of a path parameter that `decoded_segment` decodes: a name, with stand-ins for its encoded slashes."""


def at_most(count: int) -> BeforeValidator:
    """Return the validator of a mapping of up to `count` values. A larger one gives one error, not one per value."""

    def check(values: object) -> object:
        if isinstance(values, dict) and len(values) > count:
            raise ValueError(f"at most {count:,} values, got {len(values):,}")
        return values

    return BeforeValidator(check)


def check_step_range(from_step: int, to_step: int) -> None:
    if from_step > to_step:
        raise InvalidRequest(f"query.from_step: {from_step} is beyond to_step {to_step}")


def api_router(**settings: Any) -> APIRouter:
    """Return a router whose routes refuse unknown query parameters; `settings` are those of APIRouter.

    An operation has the name of its function, which generators of clients take for theirs.
    """
    return APIRouter(
        dependencies=[Depends(request_guards.refuse_unknown_parameters)],
        generate_unique_id_function=lambda route: route.name,
        **settings,
    )


def decoded_segment(segment: str) -> str:
    """Return a path parameter with its encoded slashes restored."""
    return segment.replace(request_guards.STAND_IN, "/")
