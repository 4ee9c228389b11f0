"""Records of the configuration matrix of a step. NaN means "not estimable"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["MatrixCellRecord", "MatrixPairRecord", "MatrixRecord", "MismatchRecord"]


@dataclass(frozen=True, slots=True)
class MismatchRecord:
    """The mismatch of two configurations over the same tokens: k3 in nats per token with its interval, and mean |d|."""

    comparison: str
    k3_kl: float
    low: float
    high: float
    interval_name: str
    mean_abs_d: float


@dataclass(frozen=True, slots=True)
class MatrixCellRecord:
    """A scorer with options on some hardware; `changed` are the options that differ from its plainest cell.

    `reason` says why there is no result. `seconds_per_token` is the time of one pass per response token, without the
    start of the engine; NaN: not measured.
    """

    probe: str
    scorer: str
    options: Mapping[str, Any]
    changed: Mapping[str, Any]
    hardware: str
    state: str
    reason: str | None
    against_reference: MismatchRecord | None
    seconds_per_token: float


@dataclass(frozen=True, slots=True)
class MatrixPairRecord:
    """A configuration of the trainer against one of the engine on the same hardware, by the ids of their probes."""

    trainer: str
    engine: str
    mismatch: MismatchRecord


@dataclass(frozen=True, slots=True)
class MatrixRecord:
    """The cells of a step over one set of rollouts, oldest first; `reference` is the probe of the reference.

    `other_cells` counts cells over other rollouts or weights, which are left out.
    """

    run: str
    attempt: int
    step: int
    rollouts: int
    tokens: int
    reference: str | None
    cells: tuple[MatrixCellRecord, ...]
    pairs: tuple[MatrixPairRecord, ...] = ()
    recommendations: tuple[str, ...] = ()
    other_cells: int = 0
