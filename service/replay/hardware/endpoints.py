"""HTTP: hardware."""

from __future__ import annotations

from fastapi import APIRouter

from foreshock_service.platform.context import Context
from foreshock_service.platform.security import Reader
from foreshock_service.replay.hardware import service
from foreshock_service.replay.hardware.schemas import HardwareRead

router = APIRouter(prefix="/v1", tags=["hardware"])


@router.get("/hardware")
def read_hardware(context: Context, principal: Reader) -> HardwareRead:
    """Return the workers, and the queued jobs, running jobs and published scores of each accelerator."""
    with context.database.read() as session:
        return service.read_hardware(session, principal)
