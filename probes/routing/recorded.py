"""The routes and log-probs of one scorer, and the file in which an engine's process hands them to the worker."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreshock.fingerprint import Fingerprint
from foreshock.measures.routing import UNKNOWN_EXPERT
from foreshock_probes.scorers.request import UnsupportedScoreError

__all__ = ["MOST_ROUTES_BYTES", "RecordedRoutes", "empty_routes", "read_routes", "write_routes"]

MOST_ROUTES_BYTES = 512 << 20
"""The largest array of experts. The worker holds two of them, and some times their size in values per token and layer
while it compares them."""
_FINGERPRINT = "fingerprint"


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRoutes:
    """The experts that each of T response tokens was computed with, and its log-prob of the same forward pass.

    `experts` [T, L, k] are those at the state before the token, UNKNOWN_EXPERT if there is none; `layers` [L] are the
    numbers of the layers in the model; `log_probs` [T] in nats.
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


def write_routes(path: Path, routes: RecordedRoutes) -> None:
    """Write the routes to `path`."""
    from safetensors.numpy import save_file

    arrays = {
        "experts": np.ascontiguousarray(routes.experts),
        "layers": np.array(routes.layers, np.int64),
        "log_probs": np.ascontiguousarray(routes.log_probs),
    }
    save_file(arrays, path, metadata={_FINGERPRINT: routes.fingerprint.to_json()})


def read_routes(path: Path) -> RecordedRoutes:
    """Return the routes in the file that `write_routes` wrote."""
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        return RecordedRoutes(
            experts=file.get_tensor("experts"),
            layers=tuple(file.get_tensor("layers").tolist()),
            log_probs=file.get_tensor("log_probs"),
            fingerprint=Fingerprint.from_json(file.metadata()[_FINGERPRINT]),
        )
