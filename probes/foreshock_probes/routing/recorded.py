"""Routes and log-probs of scorers: recorded in an engine's process, passed in a file, compared in the worker."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreshock.api.records import to_json
from foreshock.errors import ForeshockError
from foreshock.fingerprint import Fingerprint
from foreshock.measures.routing import UNKNOWN_EXPERT, measure_routing
from foreshock.probe_kinds import ROUTING
from foreshock.rollouts import RolloutBatch
from foreshock.routing import RoutingComparison
from foreshock.scorers import SCORERS, score_name
from foreshock_probes.offers import imported
from foreshock_probes.scorers.request import (
    Report,
    ScoreRequest,
    UnsupportedScoreError,
    WarmModel,
    read_arrays,
    write_arrays,
)

if TYPE_CHECKING:
    from foreshock_probes.job_scoring import LeasedJob

PART = f"{__name__}:run_part"
"""The task of an engine that records routes."""
MOST_ROUTES_BYTES = 512 << 20
"""The largest array of experts. While the worker compares two of them, it also holds values per token and layer of
several times their size."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRoutes:
    """The experts and the log-prob of each of T response tokens, from the same forward pass.

    `experts` [T, L, k] are those of the state before the token, UNKNOWN_EXPERT if there is none. `layers` [L] are the
    numbers of the layers in the model. `log_probs` [T] are in nats.
    """

    experts: NDArray[np.int16]
    layers: tuple[int, ...]
    log_probs: NDArray[np.float32]
    fingerprint: Fingerprint


def empty_routes(tokens: int, layers: int, top_k: int) -> NDArray[np.int16]:
    """Return unknown experts [tokens, layers, top_k]. Raises UnsupportedScoreError beyond MOST_ROUTES_BYTES."""
    size = math.prod((tokens, layers, top_k)) * np.dtype(np.int16).itemsize
    if size > MOST_ROUTES_BYTES:
        raise UnsupportedScoreError(
            f"the routes of {tokens} tokens through {layers} layers of {top_k} experts need {size >> 20} MiB, at most "
            f"{MOST_ROUTES_BYTES >> 20} are allowed: request a probe of fewer rollouts (max_rollouts)"
        )
    return np.full((tokens, layers, top_k), UNKNOWN_EXPERT, np.int16)


def read_routes(path: Path) -> RecordedRoutes:
    """Return the routes in the file that `run_part` wrote."""
    found, fingerprint = read_arrays(path)
    return RecordedRoutes(found["experts"], tuple(found["layers"].tolist()), found["log_probs"], fingerprint)


class RoutesDifferError(ForeshockError):
    """The two scorers have different layers of experts, so their routes cannot be compared."""


def run_part(request: ScoreRequest, warm: WarmModel, report: Report) -> None:
    """Score the request as a task of its engine, and write the experts of its tokens to the file `result`.

    Raises UnsupportedScoreError if the scorer or the model has no routed experts that can be recorded.
    """
    named = SCORERS[request.scorer].routes
    if named is None:
        raise UnsupportedScoreError(
            f"{request.scorer} cannot record routed experts; scorers that can: {', '.join(ROUTING.usable_scorers())}"
        )
    found: RecordedRoutes = imported(named)(request, warm, report)
    layers = np.array(found.layers, np.int64)
    write_arrays(request.result, found.fingerprint, experts=found.experts, layers=layers, log_probs=found.log_probs)


def run_job(job: LeasedJob) -> dict[str, Any]:
    """Compare the routes of the job's two scorers and return the comparison."""
    tasks = [job.task(each, f"routes-{number}.safetensors", PART) for number, each in enumerate(job.job.scorers)]
    target, behaviour = job.run_tasks(tasks, lambda task: read_routes(task.result), "routes")
    first, second = (score_name(each.scorer, each.variant) for each in job.job.scorers)
    return to_json(compare_routes(job.rollouts(), target, behaviour, (first, second)))


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
    return RoutingComparison(
        target=names[0],
        behaviour=names[1],
        target_fingerprint=target.fingerprint.to_dict(),
        behaviour_fingerprint=behaviour.fingerprint.to_dict(),
        measures=measures,
    )
