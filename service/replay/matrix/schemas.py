"""The HTTP schemas of the configuration matrix."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from foreshock_service.replay.probes.jobs import JobState


class MismatchRead(BaseModel):
    """The mismatch of two configurations over the same tokens; null if it cannot be estimated."""

    comparison: str = Field(description="`target/behaviour`, names of scorers")
    k3_kl: float | None = Field(description="in nats per token")
    low: float | None = Field(description="bootstrap-t interval of k3 by prompt group")
    high: float | None
    interval_name: str
    mean_abs_d: float | None


class CellRead(BaseModel):
    """A scorer with options on some hardware: its state, its mismatch and its cost."""

    probe: str
    scorer: str
    options: dict[str, Any]
    changed: dict[str, Any] = Field(description="the options that differ from the scorer's first and plainest cell")
    hardware: str = Field(description="where it was scored; before that, where it was asked to be")
    state: JobState
    reason: str | None = Field(description="why there is no result, such as what the engine or hardware cannot do")
    against_reference: MismatchRead | None = Field(description="null: no result, no reference, or the reference itself")
    seconds_per_token: float | None = Field(
        description="time of one pass per response token, without engine start and loading"
    )


class PairRead(BaseModel):
    """A configuration of the trainer against one of the engine on the same hardware, by their probes."""

    trainer: str
    engine: str
    mismatch: MismatchRead


class MatrixRead(BaseModel):
    """The cells of a step over one set of rollouts, oldest first."""

    run: str
    attempt: int
    step: int
    rollouts: int
    tokens: int
    reference: str | None = Field(description="the probe of the reference; null: not scored yet")
    cells: list[CellRead]
    pairs: list[PairRead]
    recommendations: list[str]
    other_cells: int = Field(description="cells over other rollouts or weights, which are left out")
