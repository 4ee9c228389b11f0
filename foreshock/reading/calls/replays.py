"""The calls that read what replays found: attribution, exact divergences, layers, experts, weights, the matrix."""

from __future__ import annotations

from functools import partial
from typing import Any

from foreshock.layer_divergence import LayerComparison
from foreshock.reading.attribution_records import (
    AttributionRecord,
    WeightsSearchRecord,
    attribution_record,
    weights_search_record,
)
from foreshock.reading.matrix_records import MatrixRecord
from foreshock.reading.request import Request, json_request, of_step, run_path
from foreshock.reading.step_records import ExactStepRecord
from foreshock.routing import RoutingComparison

__all__ = ["attribution", "exact", "layers", "matrix", "routing", "weights_search"]


def attribution(run: str, step: int, *, attempt: int | None = None) -> Request[AttributionRecord]:
    """Return the causes of a step's mismatch. Raises Rejected (404) if no scores of the step are published."""
    read = partial(attribution_record, step)
    return json_request(run_path(run, "steps", step, "attribution"), [("attempt", attempt)], read)


def exact(run: str, step: int, *, attempt: int | None = None) -> Request[ExactStepRecord]:
    """Return the exact divergences of a step's pairs. Raises Rejected (404) if none are published."""
    return of_step(run, step, "exact", [("attempt", attempt)], ExactStepRecord)


def routing(run: str, step: int, *, attempt: int | None = None) -> Request[tuple[RoutingComparison, ...]]:
    """Return the newest comparisons of routed experts of a step. Raises Rejected (404) if none are published."""
    path = run_path(run, "steps", step, "routing")
    return json_request(
        path, [("attempt", attempt)], lambda value: tuple(map(RoutingComparison.from_dict, value["items"]))
    )


def layers(
    run: str, step: int, *, attempt: int | None = None, pair: str | None = None
) -> Request[tuple[LayerComparison, ...]]:
    """Return the newest comparison by layer of each pair of scorers of a step, or of one `compared/reference`.

    Raises Rejected (404) if none are published.
    """

    def read(value: Any) -> tuple[LayerComparison, ...]:
        return tuple(LayerComparison.from_dict({**item, "step": value["step"]}) for item in value["items"])

    return json_request(run_path(run, "steps", step, "layers"), [("attempt", attempt), ("pair", pair)], read)


def weights_search(run: str, step: int, *, attempt: int | None = None) -> Request[WeightsSearchRecord]:
    """Return the newest weights search of a step. Raises Rejected (404) if none is done."""
    path = run_path(run, "steps", step, "weights-search")
    return json_request(path, [("attempt", attempt)], weights_search_record)


def matrix(run: str, step: int, *, attempt: int | None = None) -> Request[MatrixRecord]:
    """Return hardware × configuration of a step, and what is recommended. Raises Rejected (404) if none is asked for.

    Its cells are probes of the kind "matrix".
    """
    return of_step(run, step, "matrix", [("attempt", attempt)], MatrixRecord)
