"""What hardware looks like over HTTP."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class WorkerRead(BaseModel):
    """A worker that asked for jobs."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    accelerator: str
    device_name: str
    scorers: list[str] = Field(description="what it can do")
    first_seen_at_us: int
    last_seen_at_us: int = Field(description="when it asked for a job, or kept one, last")


class AcceleratorRead(BaseModel):
    """A kind of hardware: who has it, and what waits for it. `any`: jobs that any accelerator may do."""

    accelerator: str
    workers: int = Field(description="seen in the last five minutes")
    devices: list[str]
    queued_jobs: int
    running_jobs: int
    scores: int = Field(description="published scores that were made on it")


class HardwareRead(BaseModel):
    """The workers that were seen, newest first, and the accelerators."""

    workers: list[WorkerRead]
    accelerators: list[AcceleratorRead]
