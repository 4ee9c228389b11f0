"""The HTTP schemas of hardware."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from foreshock_service.replay.probes.jobs import LIVE_MINUTES


class WorkerRead(BaseModel):
    """A worker that asked for jobs."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    accelerator: str
    device_name: str
    environments: list[str] = Field(description="the environments that it can score in")
    scorers: list[str] = Field(description="the scorers that it offers")
    first_seen_at_us: int
    last_seen_at_us: int = Field(description="its last request for a job, or heartbeat")


class AcceleratorRead(BaseModel):
    """A kind of hardware with its workers and jobs. `any`: jobs that any accelerator may do."""

    accelerator: str
    workers: int = Field(description=f"live workers: seen in the last {LIVE_MINUTES} minutes")
    devices: list[str] = Field(description="names of its devices, at most 50")
    queued_jobs: int
    running_jobs: int
    scores: int = Field(description="published scores of its workers")


class HardwareRead(BaseModel):
    """The workers, the one seen last first, and the accelerators."""

    workers: list[WorkerRead]
    accelerators: list[AcceleratorRead] = Field(
        description="at most 500: those with live workers first, then those with jobs, then those with scores"
    )
    accelerators_left_out: int = Field(description="accelerators beyond these")
