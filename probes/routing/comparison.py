"""Record the routes of a scorer in its engine's process, and compare those of two scorers in the worker."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from foreshock.errors import ForeshockError
from foreshock.measures.routing import measure_routing
from foreshock.rollouts import RolloutBatch
from foreshock.routing import RECORDING_SCORERS, RoutingComparison
from foreshock.scorers import SCORERS
from foreshock_probes.routing.recorded import RecordedRoutes, write_routes
from foreshock_probes.scorers.request import Report, ScoreRequest, UnsupportedScoreError, WarmModel

__all__ = ["RoutesDifferError", "compare_routes", "record_routes"]

RecordFunction = Callable[[ScoreRequest, WarmModel, Report], RecordedRoutes]


class RoutesDifferError(ForeshockError):
    """The two scorers have other layers of experts, so their routes cannot be compared."""


def record_routes(request: ScoreRequest, into: Path, warm: WarmModel, report: Report) -> None:
    """Score the request and write the experts of its tokens to the file `into`.

    Raises UnsupportedScoreError if the scorer or the model has no routed experts that can be recorded.
    """
    if request.scorer not in RECORDING_SCORERS:
        raise UnsupportedScoreError(
            f"{request.scorer} cannot record routed experts; scorers that can: {', '.join(RECORDING_SCORERS)}"
        )
    module, _, function = str(SCORERS[request.scorer].routes).partition(":")
    record: RecordFunction = getattr(importlib.import_module(module), function)
    write_routes(into, record(request, warm, report))


def compare_routes(
    rollouts: RolloutBatch, target: RecordedRoutes, behaviour: RecordedRoutes, names: tuple[str, str]
) -> RoutingComparison:
    """Return the comparison of the routes of π (`target`) and μ (`behaviour`); `names` are those of their scores.

    Raises RoutesDifferError.
    """
    shapes = [(each.layers, each.experts.shape[2]) for each in (target, behaviour)]
    if shapes[0] != shapes[1]:
        raise RoutesDifferError(
            " and ".join(
                f"{name} routes in {len(layers)} layers to {top_k} experts each"
                for name, (layers, top_k) in zip(names, shapes, strict=True)
            )
            + ": their routes cannot be compared"
        )
    measures = measure_routing(
        target.experts,
        behaviour.experts,
        target.log_probs,
        behaviour.log_probs,
        rollouts.response_offsets,
        rollouts.generated,
        rollouts.group_ids,
        target.layers,
    )
    return RoutingComparison(names[0], names[1], target.fingerprint, behaviour.fingerprint, measures)
