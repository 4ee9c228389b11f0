"""Records of the policy of automatic probes, and of the hardware. Times are UTC microseconds."""

from __future__ import annotations

from dataclasses import dataclass

from foreshock.reading.watch_records import ScorerRecord

__all__ = ["AcceleratorRecord", "HardwareRecord", "ProbePolicyRecord", "WorkerRecord"]


@dataclass(frozen=True, slots=True)
class ProbePolicyRecord:
    """Which steps of a run are probed automatically, and what its probes have cost; None: no such rule or limit.

    `state` is "off", "active" or "budget_spent", `note` the same in words. `impossible_steps` were chosen and could not
    be probed. `changed_at_us` is None if the policy was never set.
    """

    every_steps: int | None
    on_alerts: bool
    rollouts: int
    scorers: tuple[ScorerRecord, ...]
    accelerator: str | None
    budget_seconds: float | None
    state: str
    note: str = ""
    spent_seconds: float = 0.0
    automatic_probes: int = 0
    impossible_steps: int = 0
    changed_at_us: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker that asked for jobs, with the scorers and environments that it offers."""

    name: str
    accelerator: str
    device_name: str
    environments: tuple[str, ...] = ()
    scorers: tuple[str, ...] = ()
    first_seen_at_us: int | None = None
    last_seen_at_us: int | None = None


@dataclass(frozen=True, slots=True)
class AcceleratorRecord:
    """A kind of hardware with its live workers and jobs; "any": jobs that any accelerator may do."""

    accelerator: str
    workers: int
    devices: tuple[str, ...]
    queued_jobs: int
    running_jobs: int
    scores: int


@dataclass(frozen=True, slots=True)
class HardwareRecord:
    """The workers, the one seen last first, and the accelerators."""

    workers: tuple[WorkerRecord, ...]
    accelerators: tuple[AcceleratorRecord, ...]
    accelerators_left_out: int = 0
