"""Measure the cells of a matrix from files. Runs in a decoder process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreshock.measures.comparison import compare
from foreshock.rollouts import RolloutBatch
from foreshock_service.platform.store.tokens import StoredFile
from foreshock_service.replay.probes.pinned_rollouts import PinnedRollouts, read_rollouts
from foreshock_service.replay.results.files import align_scores, read_scores


@dataclass(frozen=True, slots=True)
class CellFiles:
    """A cell, by the id of its probe, and the files of its scores."""

    probe: str
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, slots=True)
class CellMeasures:
    """The mismatch of two cells: k3 and mean |d| in nats per token.

    `low` and `high` are the bootstrap-t interval of k3 by prompt group, a 95 % interval if `reliable`.
    """

    target: str
    behaviour: str
    k3_kl: float
    low: float
    high: float
    reliable: bool
    mean_abs_d: float


@dataclass(frozen=True, slots=True)
class MeasuredCells:
    """The measures of the asked pairs, and the seconds per response token of each cell; None: unknown."""

    pairs: tuple[CellMeasures, ...]
    seconds_per_token: dict[str, float | None]
    rollouts: int
    tokens: int


def measure_cells(
    rollouts: PinnedRollouts, cells: Sequence[CellFiles], pairs: Sequence[tuple[str, str]]
) -> MeasuredCells:
    """Compare each (target, behaviour) of `pairs`, ids of cells, over the rollouts."""
    batch = read_rollouts(rollouts)
    values: dict[str, NDArray[np.float32]] = {}
    seconds: dict[str, float | None] = {}
    for cell in cells:
        shards = [read_scores(file) for file in cell.files]
        values[cell.probe] = align_scores(batch, shards)
        times, tokens = [shard.seconds for shard in shards], sum(shard.num_tokens for shard in shards)
        known = sum(each for each in times if each is not None)
        seconds[cell.probe] = None if None in times or not tokens else known / tokens
    measured = tuple(_compare(batch, values, target, behaviour) for target, behaviour in pairs)
    return MeasuredCells(measured, seconds, batch.num_rollouts, batch.num_tokens)


def _compare(batch: RolloutBatch, values: dict[str, NDArray[np.float32]], target: str, behaviour: str) -> CellMeasures:
    found = compare(batch, values[target], values[behaviour]).measures()
    return CellMeasures(
        target=target,
        behaviour=behaviour,
        k3_kl=found["k3_kl"],
        low=found["k3_kl_bootstrap_low"],
        high=found["k3_kl_bootstrap_high"],
        reliable=bool(found.get("k3_kl_interval_reliable")),
        mean_abs_d=found["mean_abs_d"],
    )
